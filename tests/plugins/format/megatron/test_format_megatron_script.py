"""Launch scripts are read as a shell would read them, and never run; bash itself says what the words should be."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megatron_run.errors import InputError
from megatron_run_format_megatron.launch_script.script import MAX_BYTES, compute, is_known, load_script, read_script

#: How people write such scripts. Each prints its arguments where ``train.py`` is a program that does.
SCRIPTS = {
    "continued lines": "python train.py --num-layers 2 \\\n    --lr 1e-4 \\\n  --fp16\n",
    "arrays": """
        ARGS=(
            --num-layers 12   # twelve
            --lr 6.0e-5
            # a whole line
            --split '949,50,1'
        )
        MORE=(--fp16)
        MORE+=( --seed 7 )
        python train.py "${ARGS[@]}" ${MORE[@]}
    """,
    "one string": """
        OPTS=" \\
            --num-layers 4 \\
            --save /a/b \\
        "
        OPTS="$OPTS --bf16"
        OPTS+=" --lr 1"
        python train.py $OPTS
    """,
    "sums": "A=8; B=$((2 + 2))\nC=$(($A*$B))\npython train.py --batch $((C * 3 / 2)) --last $(( 7 % 4 ))",
    "defaults": 'TP=${TP:-4}\npython train.py --tp $TP --pp ${PP:-2} --x ${TP:-9} --y "${Q-a b}"',
    "quotes": """
        VALUE=3
        python train.py --a "it's $((1+1))" --b 'no $VALUE' --c a\\ b --d "\\"x\\" \\$y" --e pre"fix"'ed'
    """,
    "output and pipes": "LOG=x\npython train.py --num-layers 2 --save here 2>/dev/null | cat",
    "keywords": "if true; then\n  N=3\nfi\nexport N M=4\nfor x in 1; do :; done\n{ python train.py --n $N --m $M; }",
    "comments": "#!/bin/bash\n# python train.py --no 1\npython train.py --tag a#b --n 1 # --m 2\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    (tmp_path / "printing.sh").write_text(
        "python() { shift; printf '%s\\n' \"$@\"; }\n" + SCRIPTS[name], encoding="utf-8"
    )
    command = [bash, "printing.sh"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=30, check=True)
    assert read_script(SCRIPTS[name], "x.sh").arguments == done.stdout.splitlines()


def test_what_only_a_shell_knows_stays_as_it_is_written() -> None:
    text = (
        'A=$1\nB="$(cat file)/x"\npython train.py --a $A --b $B --c `date` --d ${B%x} --e "$HOME" --f $((A + 1)) --g 1'
    )
    words = read_script(text, "x.sh").arguments
    assert words[1::2] == ["$1", "$(cat file)/x", "`date`", "${B%x}", "$HOME", "$((A + 1))", "1"]
    assert [is_known(word) for word in words[1::2]] == [False] * 6 + [True]


def test_the_training_command_is_the_last_that_starts_a_program_with_flags() -> None:
    text = """
        python tools/prepare.py --input x
        torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --lr 1
        python report.py results
    """
    script = read_script(text, "x.sh")
    assert script.arguments == ["--lr", "1"]
    assert script.launcher == ["torchrun", "--nproc_per_node", "8", "--nnodes", "2"]


def test_a_command_inside_a_word_is_taken_apart() -> None:
    text = 'CMD="python -u pretrain_gpt.py --lr 1 --save \'/a b\'"\nsrun bash -c "cd x; ${CMD} --seed 2"'
    assert read_script(text, "x.sh").arguments == ["--lr", "1", "--save", "/a b", "--seed", "2"]


def test_branches_are_named_and_not_decided() -> None:
    text = "if [ $X ]; then\nN=1\nelse\nN=2\nfi\npython train.py --n $N"
    script = read_script(text, "x.sh")
    assert (script.arguments, script.branches) == (["--n", "2"], [1])


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    text = f"A=$(touch {made})\nB=`touch {made}`\ntouch {made}\npython train.py --a $A --b $(touch {made}) --c $((1+1))"
    assert read_script(text, "x.sh").arguments[-2:] == ["--c", "2"]
    assert not made.exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo hello", "x.sh starts no training"),
        ("python train.py", "x.sh starts no training"),
        ("python train.py --a 1\nB='open", 'x.sh:2: "\'" opens what nothing closes'),
        ('A="' + "a" * 4096 + '"\n' + 'A="$A$A"\n' * 30 + "python train.py --a $A", "its variables repeat each other"),
    ],
)
def test_what_is_no_script_is_one_line(text: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        read_script(text, "x.sh")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("piece", ["(", ")", "a=$((", "a=( b ) ", "export "])
def test_a_long_statement_takes_time_by_its_length_and_not_by_its_square(piece: str) -> None:
    """The longest that is read; it took minutes."""
    start = time.process_time()
    with pytest.raises(InputError, match="starts no training"):
        read_script(piece * (MAX_BYTES // len(piece)), "x.sh")
    assert time.process_time() - start < 15


@pytest.mark.parametrize(("content", "why"), [(b"\0" * 9, "it is binary"), (b"#" * (257 << 10), "above 256 KiB")])
def test_a_file_that_is_no_script_is_refused(content: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match=why):
        load_script(tmp_path / "x")
    (tmp_path / "pretrain.sh").touch()
    with pytest.raises(InputError, match=r"cannot be read: No such file .*did you mean 'pretrain\.sh'"):
        load_script(tmp_path / "pretrian.sh")


@pytest.mark.parametrize("text", ["2 ** 99", "__import__('os')", "1 / 0", "A", "a.b", "(" * 90, "1.5 + 1", "9" * 300])
def test_only_sums_of_integers_are_computed(text: str) -> None:
    assert compute(text, {"B": ["2"]}) is None
    assert compute("-B * (3 + $B) / ${B}", {"B": ["2"]}) == -5
