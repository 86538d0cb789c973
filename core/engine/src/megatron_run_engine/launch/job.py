"""What passes between the local launcher and a rank: a job on the way in, a report on the way out, both JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode


@dataclass(frozen=True)
class Job:
    """Everything a rank is told that its environment does not say.

    ``request`` is what the user typed; ``folder``, ``attempt`` the run folder opened by the launcher; ``init_method``
    where the ranks meet; ``lifeline`` a file descriptor that reads end-of-file when the launcher is gone.
    """

    request: Request
    folder: Path
    attempt: int
    init_method: str
    lifeline: int
    debug: bool = False

    def write(self, path: Path) -> None:
        """Write the job where a rank will :meth:`read` it."""
        content = {
            "request": self.request.to_json(),
            "folder": str(self.folder),
            "attempt": self.attempt,
            "init_method": self.init_method,
            "lifeline": self.lifeline,
            "debug": self.debug,
        }
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content["request"] = Request.from_json(content["request"])
        content["folder"] = Path(content["folder"])
        return cls(**content)


def page_path(job: Path, rank: int) -> Path:
    """Where ``rank`` says what it does: beside the job."""
    return job.with_name(f"page-{rank}")


@dataclass(frozen=True)
class Report:
    """How a rank says that it failed: exit code and one line.

    ``secondary``: because another rank failed before, ``lost`` where it is known which.
    """

    code: int
    message: str
    secondary: bool = False
    lost: int | None = None

    @staticmethod
    def path(job: Path, rank: int) -> Path:
        """Beside the job."""
        return job.with_name(f"report-{rank}.json")

    def write(self, job: Path, rank: int) -> None:
        """Leave the report where the launcher will :meth:`read` it, whole or not at all."""
        path = self.path(job, rank)
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def read(cls, job: Path, rank: int) -> Report | None:
        """The report of ``rank``, or None when it left none."""
        try:
            return cls(**json.loads(cls.path(job, rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Ending:
    """How a run ended: exit code, its folder when there is one, and the line to show, which may be empty.

    ``steps`` is how many steps its local ranks had done by then, as far as they could say.
    """

    code: ExitCode
    folder: Path | None = None
    message: str = ""
    steps: int = 0
