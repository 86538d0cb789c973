"""The things that a run keeps beside its checkpoints: its tokenizer, and what its first weights came with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run_engine.checkpoint.kept_files import (
    TokenizerFiles,
    keep_source,
    keep_tokenizer,
    kept_tokenizer,
    tokenizer_files,
)
from megatron_run_engine.checkpoint.step_folder import find_step
from megatron_run_engine.data.standalone_tokenizer import reads_bytes, same_vocabulary
from megatron_run_engine.run_folder.changes import identity

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run.contracts import DataSource
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.run_folder import RunFolder


class Keeping:
    """The kept files of ``run`` in its ``folder``, for the tokenizer of ``data``.

    Raises OSError where its file cannot be read.
    """

    def __init__(self, run: ResolvedRun, folder: RunFolder, data: DataSource) -> None:
        self._run, self._folder, self._file = run, folder, data.tokenizer_file
        self._tokenizer = None if self._file is None else self._files(self._file, data)
        #: What a step records of the tokenizer.
        self.record = None if self._tokenizer is None else self._tokenizer.record
        #: What a step records of the longest sequence: where positions are learned, it is that of the samples.
        self.positions: int | None = None

    def _files(self, file: Path, data: DataSource) -> TokenizerFiles:
        """The files of the tokenizer, by the user's name for it: ``file`` may be a copy in the user's cache.

        The template is the one that the model learns, whoever reads the kept files or their export.
        """
        named = identity(self._run).get("data.tokenizer")
        configured = named if isinstance(named, str) else None
        return tokenizer_files(file, data.end_of_text, configured=configured, template=data.chat_template())

    def begin(self, step: Path | None, home: Path | None = None) -> None:
        """Write the files on rank 0, for a run that goes on from the ``step`` in this folder, its own or another one's.

        ``home`` is the run folder of the step, by default around it. Call it once nothing refuses the run: a tokenizer
        that does not fit must not replace the run's own.
        """
        if self._folder.rank:
            return
        if step is not None:
            checkpoints, number = find_step(step)
            about, home = checkpoints.manifest(number).about, home or checkpoints.home
            if identity(self._run).get("model.position") == "rope":
                self.positions = about.longest
            if home.resolve() != self._folder.path.resolve() and self._same_text(home, about):
                keep_source(home, self._folder.path)
        if self._tokenizer is not None:
            keep_tokenizer(self._tokenizer, self._folder.path)

    def _same_text(self, home: Path, about: About) -> bool:
        """Whether ids mean what they meant to the weights ``about``, as far as is known: else their source misleads."""
        kept = kept_tokenizer(home, about)
        if kept is None:
            return about.tokenizer is None and (not reads_bytes(about.identity) or reads_bytes(identity(self._run)))
        known = self._file is not None or reads_bytes(identity(self._run))
        return known and same_vocabulary(kept, self._file)
