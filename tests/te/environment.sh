#!/bin/sh
# Makes an environment with the real Transformer Engine, for the tests marked `te`: `make te-env`. No GPU is needed, nor a
# CUDA installation: compiler, headers and libraries come in wheels. 5 GB are downloaded; building takes 7 minutes on two
# cores. A step that came to its end is not repeated. The wheel that is built here stays in ENVIRONMENT/wheels.
#
#   sh tests/te/environment.sh ENVIRONMENT PYTHON MEMBER...
set -eu
environment=$1 python=$2
shift 2

TORCH=2.11.0 # its wheel on the index is made for CUDA 13.0
CUDA_MINOR="<13.1"
ENGINE=2.20.2
OURS="annotated-types==0.8.0 click==8.5.1 packaging==26.3 pluggy==1.7.0 pydantic==2.14.3 pydantic_core==2.50.4
  rich==15.0.0 ruamel.yaml==0.19.1 safetensors==0.8.0 tokenizers==0.23.3 typing-inspection==0.4.5 xxhash==4.1.0 hatchling==1.33.0
  editables==0.6 pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0"
BUILD="setuptools==81.0.0 wheel==0.48.0 ninja==1.13.0 pybind11==3.1.0 einops==0.8.2 onnx==1.23.2 onnxscript==0.7.2
  importlib-metadata==10.2.0 pydantic==2.14.3 packaging==26.3"

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
  echo "Python 3.12 is needed: make te-env TE_PYTHON=/path/to/python3.12" >&2
  exit 1
}
[ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
environment=$(cd "$environment" && pwd -P)
pip() { "$environment/bin/python" -m pip -q --disable-pip-version-check "$@"; }

# step NAME INPUT: whether the step still has to be done for these inputs; done NAME INPUT says that it was.
step() { [ "$(cat "$environment/.step-$1" 2>/dev/null)" != "$2" ]; }
done_() { printf %s "$2" >"$environment/.step-$1"; }

if step torch "$TORCH"; then
  pip install "torch==$TORCH"
  done_ torch "$TORCH"
fi
if step engine "$ENGINE $CUDA_MINOR $BUILD"; then
  # shellcheck disable=SC2086 # a list of requirements
  pip install "torch==$TORCH" $BUILD
  pip install --no-deps "nvidia-cuda-nvcc$CUDA_MINOR" "nvidia-nvvm$CUDA_MINOR" "nvidia-cuda-crt$CUDA_MINOR" \
    "nvidia-cuda-cccl$CUDA_MINOR" "transformer-engine==$ENGINE" "transformer-engine-cu13==$ENGINE"
  site=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cuda=$site/nvidia/cu13
  # The wheels have no names without a version, which the linker asks for.
  for library in cudart cublas cublasLt nvrtc; do ln -sf "lib$library.so.13" "$cuda/lib/lib$library.so"; done
  ln -sfn lib "$cuda/lib64"
  export CUDA_HOME="$cuda" CUDNN_PATH="$site/nvidia/cudnn" LIBRARY_PATH="$cuda/lib" NVTE_FRAMEWORK=pytorch
  export CPATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$cuda/include:$cuda/include/cccl"
  export NVTE_CUDA_ARCHS=90 TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS="${MAX_JOBS:-2}" PATH="$environment/bin:$PATH"
  sources=$environment/sources
  pip download --no-deps --no-build-isolation --no-binary :all: -d "$sources" "transformer-engine-torch==$ENGINE"
  pip wheel --no-deps --no-build-isolation -w "$environment/wheels" "$sources/transformer_engine_torch-$ENGINE.tar.gz"
  pip install --no-deps --force-reinstall "$environment"/wheels/transformer_engine_torch-"$ENGINE"-*.whl
  done_ engine "$ENGINE $CUDA_MINOR $BUILD"
fi
if step ours "$OURS $*"; then
  # shellcheck disable=SC2086
  pip install "torch==$TORCH" $OURS
  for member; do pip install --no-deps --no-build-isolation -e "./$member"; done
  done_ ours "$OURS $*"
fi
# torch first: it loads the libraries of CUDA, which Transformer Engine looks for. With the paths of its build it would take
# those of a system to be there, and load no more.
env -u CUDA_HOME -u CUDNN_PATH "$environment/bin/python" -c 'import torch, transformer_engine, transformer_engine.pytorch
print("Transformer Engine", transformer_engine.__version__, "with torch", torch.__version__)'
