"""What becomes of a script's datasets and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tests.plugins.format.megatron.test_format_megatron_translate import flags_of, key


def test_datasets_are_blended_split_and_masked_as_the_script_says() -> None:
    script = "--data-path 3 a 1 b --split 9,1 --eod-mask-loss --tokenizer-type GPT2BPETokenizer --data-cache-path c"
    found = flags_of(script)
    data = {name: key(found, f"data.{name}") for name in ("use", "paths", "weights", "split", "order", "cache")}
    assert data == {
        "use": "indexed", "paths": ["a", "b"], "weights": [3, 1], "split": [9, 1, 0], "order": "megatron", "cache": "c"
    }  # fmt: skip
    assert (key(found, "data.mask_end"), key(found, "data.end_of_document")) == (True, 50256)
    assert key(flags_of("--data-path a 2 b"), "data.paths") == ["a", "2", "b"]
    assert key(flags_of("--data-path a --mock-data"), "data.use") == "mock"


def test_a_tokenizer_that_is_here_counts_its_ids_and_is_named_for_text(tmp_path: Path) -> None:
    content = {"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 9, "content": "</s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = flags_of(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}")
    assert (key(found, "model.vocab_size"), key(found, "data.vocab_size")) == (10, 10)
    (warning,) = found.warnings
    assert warning.endswith(f"data.tokenizer={tmp_path / 'tokenizer.json'}")
    script = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    filled = flags_of(f"{script} --data-path a")
    assert key(filled, "data.tokenizer") == str(tmp_path / "tokenizer.json")
    assert not filled.warnings, "nothing is left to fill in"
    assert script in {setting.why for setting in filled.settings}
    (tmp_path / "tokenizer.json").write_text("[]")
    assert (
        key(flags_of(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"), "model.vocab_size") is None
    )


def test_two_files_of_a_vocabulary_are_named_by_their_folder() -> None:
    def said(vocabulary: str, merges: str) -> str:
        script = f"--tokenizer-type GPT2BPETokenizer --vocab-file {vocabulary} --merge-file {merges}"
        return next(warning for warning in flags_of(script).warnings if "data.tokenizer" in warning)

    assert said("gpt2/vocab.json", "gpt2/merges.txt").endswith("set data.tokenizer=gpt2")
    both = "set data.tokenizer to a folder that has both as vocab.json and merges.txt"
    assert said("gpt2/vocab.json", "other/merges.txt").endswith(both)
    assert said("gpt2/gpt2-vocab.json", "gpt2/merges.txt").endswith(both)
