"""A folder for the Hub: its README, and how it gets there in one commit."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from megatron_run.contracts import Card, Publisher
from megatron_run.errors import InputError, RunError
from megatron_run.errors.wording import advice
from megatron_run_format_huggingface.hub import failures
from megatron_run_format_huggingface.hub.names import MODEL, at_home, parse

#: Weights of an earlier commit, which would be read in the place of those that are sent.
_OLD = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")


class HubRepository(Publisher):
    """The repository ``name``, ``ORG/NAME``, of models that ``library`` loads.

    Raises :class:`InputError` for another name, and without a token.
    """

    def __init__(self, name: str, library: str) -> None:
        self._name, self._library = parse(name, MODEL), library
        if self._name.revision:
            raise InputError(f"{name} has a revision", why="what is pushed becomes a new one", fix="type ORG/NAME")
        with failures.in_one_line(self._name):
            from huggingface_hub import get_token

            if get_token() is None:
                why, fix = "no token says who you are", f"{failures.LOGIN} to one that may write"
                raise InputError(f"{self._name} cannot be pushed", why=why, fix=fix)

    def readme(self, card: Card) -> str:
        """Front matter in the Hub's form, and the card."""
        base = at_home(Path(card.base))
        lines = [f"library_name: {self._library}", "tags:", "- megatron-run"]
        lines += [] if base is None else [f"base_model: {base.repository}"]
        began = "" if base is None else f"It began with the weights of {base.repository} at commit {base.revision}.\n\n"
        title = self._name.repository.rpartition("/")[2]
        front = "\n".join(("---", *lines, "---"))
        return f"{front}\n\n# {title}\n\n{began}{card.text}"

    def send(self, folder: Path) -> str:
        """Send ``folder`` in one commit; a repository that is new is private. Raises a RunError for each failure."""
        try:
            with failures.in_one_line(self._name):
                return self._send(folder)
        except RunError as error:
            again = f"hf upload {self._name.repository} {quote(str(folder))}"
            error.fix = advice(error.fix, f"{folder} is whole, and is sent by: {again}")
            raise

    def _send(self, folder: Path) -> str:
        from huggingface_hub import HfApi

        api = HfApi()
        made = api.create_repo(self._name.repository, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="Export of megatron-run",
            delete_patterns=[*_OLD],
        )
        return str(commit.commit_url)
