"""The thread that talks to MLflow, and the queue before it."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

#: The tag by which a later attempt finds the run of an earlier one.
TAG = "megatron_run.run_id"
#: Steps that wait for the server before further ones are dropped: hours of a dead server, some megabytes.
WAITING = 10_000
#: Values that MLflow takes in one request.
BATCH = 1000

#: A request, given the client and MLflow's own id of the run.
Request = Callable[[MlflowClient, str], object]


class Sender:
    """Sends what ``log`` and ``text`` get, in order, from a thread of its own.

    They raise what the thread failed with, once; ``RuntimeError`` when the queue is full. The thread is a daemon: a
    server that hangs does not keep the process alive.
    """

    def __init__(
        self,
        uri: str | None,
        experiment: str,
        name: str,
        run_id: str,
        texts: Mapping[str, str],
        parameters: Mapping[str, Any],
    ) -> None:
        self._uri, self._experiment, self._name, self._run_id = uri, experiment, name, run_id
        self._texts, self._parameters = texts, parameters
        self._queue: Queue[list[Metric] | Request | None] = Queue(WAITING)
        self._error: Exception | None = None
        self._thread = Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, numbers: Mapping[str, float], step: int, time: float | None = None) -> None:
        """Send ``numbers`` of ``step``; ``time`` in seconds since the epoch, None for now."""
        milliseconds = round(1000 * (clock.time() if time is None else time))
        self._put([Metric(name, value, milliseconds, step) for name, value in numbers.items()])

    def text(self, name: str, text: str) -> None:
        """Send ``text`` as the artifact ``name``."""
        self._put(lambda client, run: client.log_text(run, text, name))

    def close(self, status: str, timeout_s: float) -> None:
        """Send what is left and the final ``status``. Raises RuntimeError when that takes longer than ``timeout_s``."""
        self._put(lambda client, run: client.set_terminated(run, status))
        self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise RuntimeError(f"the MLflow server took not everything within {timeout_s:g} s; the rest is lost")
        self._raise_error()

    def _put(self, item: list[Metric] | Request | None) -> None:
        self._raise_error()
        try:
            self._queue.put_nowait(item)
        except Full:
            raise RuntimeError(f"{WAITING} steps wait for the MLflow server; this one is dropped") from None

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        run: str | None = None
        client: MlflowClient | None = None
        more = True
        while more:
            requests, more = self._next()
            try:
                client = client or MlflowClient(self._uri)
                run = run or self._open(client)
                for request in requests:
                    request(client, run)
            except Exception as error:  # whatever the server or the network did: the next event raises it
                self._error = error

    def _next(self) -> tuple[list[Request], bool]:
        """All that waits, values joined into few requests; False after the last."""
        requests: list[Request] = []
        values: list[Metric] = []
        item = self._queue.get()
        while item is not None:
            if isinstance(item, list):
                values += item
            else:
                requests.append(item)
            try:
                item = self._queue.get_nowait()
            except Empty:
                return [*_batches(values), *requests], True
        return [*_batches(values), *requests], False

    def _open(self, client: MlflowClient) -> str:
        """The run of an earlier attempt, running again, or a new one."""
        found = client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else client.create_experiment(self._experiment)
        earlier = client.search_runs([experiment], f"tags.`{TAG}` = '{self._run_id}'", max_results=1)
        if earlier:
            run = str(earlier[0].info.run_id)
            client.update_run(run, status="RUNNING")
            return run
        run = str(client.create_run(experiment, run_name=self._name, tags={TAG: self._run_id}).info.run_id)
        for name, value in self._parameters.items():
            client.log_param(run, name, value)
        for name, text in self._texts.items():
            client.log_text(run, text, name)
        return run


def _batches(values: list[Metric]) -> list[Request]:
    def request(part: list[Metric]) -> Request:
        return lambda client, run: client.log_batch(run, metrics=part)

    return [request(values[start : start + BATCH]) for start in range(0, len(values), BATCH)]
