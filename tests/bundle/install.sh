#!/bin/sh
# Installs megatron-run from this folder into an environment of its own, without a network and beside the PyTorch that
# is there already, which stays as it is:
#
#     ./install.sh [FOLDER]          the checkout goes to FOLDER (megatron-run), its environment to FOLDER/.venv
#     PYTHON=python3.12 ./install.sh where that Python is another than python3
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
folder=${1:-megatron-run}

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "there is no $python: set PYTHON to a Python @PYTHON@"
"$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")' ||
  fail "$python is not Python @PYTHON@, for which this bundle was made: set PYTHON"
(cd "$here" && sha256sum --quiet -c SHA256SUMS) || fail "files differ from SHA256SUMS: copy the bundle again"
[ ! -e "$folder" ] || fail "$folder exists: name another folder, or remove it"

# Where torch lies, and its version; read without importing it.
torch=$("$python" -c '
from importlib import metadata
found = metadata.distribution("torch")
print(found.version, found.locate_file(""))' 2>/dev/null) ||
  fail "$python has no PyTorch: install torch >= 2.9 for your GPU first, or set PYTHON; this bundle brings none"
version=${torch%% *}
site=${torch#* }
"$python" -c 'import sys
major, minor = sys.argv[1].split(".")[:2]
sys.exit(not (2, 9) <= (int(major), int(minor)) < (3, 0))' "$version" ||
  fail "PyTorch $version is too old or too new: 2.9 or newer, below 3, is needed"

# What the bundle leaves out because it was said to be here: a line for each package, with a version if one was named.
absent=$("$python" -c 'import sys
from importlib import metadata
for line in open(sys.argv[1], encoding="utf-8"):
    name, _, wanted = line.strip().partition(" ")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        print(name, end=" ")
        continue
    if wanted and found != wanted:
        print(f"{name}=={wanted} ({found} is)", end=" ")' "$here/have.txt")
[ -z "$absent" ] ||
  fail "this bundle leaves out packages that are not here: ${absent% }; make it with HAVE=LIST, which here $python -m pip list --format=freeze prints"

mkdir -p "$folder"
tar -xzf "$here/checkout.tar.gz" -C "$folder"
"$python" -m venv --system-site-packages --without-pip "$folder/.venv"
inner=$folder/.venv/bin/python
# An environment made inside of another one sees the packages of neither: name the place.
"$inner" -c 'import sys; sys.exit(sys.argv[1].rstrip("/") not in sys.path)' "$site" ||
  echo "$site" >"$("$inner" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"

echo "torch==$version" >"$folder/.venv/constraints.txt"
pip=$(ls "$here"/wheels/pip-*.whl)
install() {
  "$inner" "$pip/pip" --disable-pip-version-check -q install --no-index --no-build-isolation \
    -c "$folder/.venv/constraints.txt" "$@"
}
install --no-deps megatron-core --find-links "$here/wheels"
install --no-deps --ignore-installed "$here"/wheels/megatron_run*.whl # also over another one of the machine's
install --find-links "$here/wheels" -r "$here/requirements.txt"

if [ -d "$here/te" ]; then # the other packages lead its loader to the cuDNN that this PyTorch uses
  install --no-deps --find-links "$here/wheels" einops
  install --no-deps --ignore-installed "$here"/te/*.whl
fi

touch "$folder/.venv/.bundle" # by which make knows that nothing is to be installed
echo "installed in $folder, beside PyTorch $version of $site"
echo "  $folder/.venv/bin/megatron-run doctor"
echo "  cd $folder && make gpu"
