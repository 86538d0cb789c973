"""observer=mlflow: what reaches a store, and what a server that hangs costs."""

from __future__ import annotations

import socket
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from megatron_run.contracts import EvalMetrics
from megatron_run.contracts.observer import STEP_CURVES
from megatron_run.errors import RunError
from megatron_run.planning import load_config
from megatron_run_observer_mlflow import MLflow, Options
from megatron_run_testing.observer import example_run, example_step, observer_checks
from tests.contracts.conformance import failures

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """MLflow's store of files: the only one that needs neither a server nor a database."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "store").as_uri()


def client_of(store: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store)


def test_it_passes_its_kinds_suite(store: str) -> None:
    assert failures(observer_checks(lambda: MLflow(Options(uri=store)))) == {}


def test_two_attempts_are_one_run_with_every_number(store: str, tmp_path: Path) -> None:
    for attempt, steps, reason in ((1, (1, 2), "stopped"), (2, (2, 3), "finished")):
        observer = MLflow(Options(uri=store, experiment="mine", name="third try"))
        observer.on_train_start(example_run(tmp_path, attempt=attempt, first_step=steps[0]))
        for step in steps:
            observer.on_step_end(example_step(step, attempt + step / 8))
        observer.on_eval_end(EvalMetrics(steps[-1], "validation", 2.5, 12.5, 64))
        observer.on_sample("once upon a time")
        observer.on_train_end(reason)
    client = client_of(store)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("third try", "FINISHED")
    assert run.data.params["parameters"] == "1000"
    assert set(run.data.metrics) == set(STEP_CURVES) | {"model/aux", "eval/loss", "eval/perplexity"}
    losses = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert losses == [(1, 1.125), (2, 1.25), (2, 2.25), (3, 2.375)]
    texts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert texts == {"config.yaml", "plan.txt", "sample.txt"}


def test_a_run_that_fails_is_marked_as_failed(store: str, tmp_path: Path) -> None:
    observer = MLflow(Options(uri=store))
    (tmp_path / "wide" / "run-000").mkdir(parents=True)
    (tmp_path / "wide" / "sweep.json").touch()
    observer.on_train_start(example_run(tmp_path / "wide" / "run-000"))
    observer.on_error(RuntimeError("a rank died"))
    client = client_of(store)
    (run,) = client.search_runs([client.get_experiment_by_name("megatron-run").experiment_id])
    assert (run.info.run_name, run.info.status) == ("wide/run-000", "FAILED")


def test_a_server_that_hangs_delays_only_the_end_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        observer = MLflow(Options(uri=f"http://127.0.0.1:{nobody.getsockname()[1]}", timeout_s=0.2))
        start = monotonic()
        observer.on_train_start(example_run(tmp_path))
        assert observer._sender is not None
        thread = observer._sender._thread
        for step in range(100):
            observer.on_step_end(example_step(step))
        with pytest.raises(RuntimeError, match=r"within 0\.2 s"):
            observer.on_train_end("finished")
        assert monotonic() - start < 60  # a request of MLflow's waits for two minutes
    thread.join(60)  # the server is gone, and so are its connections
    assert not thread.is_alive()


def test_what_a_server_refuses_is_raised_by_a_later_event(tmp_path: Path) -> None:
    observer = MLflow(Options(uri="nonsense://nowhere", timeout_s=30))
    observer.on_train_start(example_run(tmp_path))
    observer.on_step_end(example_step(1))
    with pytest.raises(Exception, match="nonsense"):
        observer.on_train_end("finished")


def test_without_a_server_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RunError, match="observer=mlflow has no server; name one"):
        load_config("preset:tiny", plugins=("observer=mlflow",))
    load_config("preset:tiny", plugins=("observer=mlflow,uri=http://127.0.0.1:9",))


def test_a_password_in_a_configuration_is_refused_and_not_repeated() -> None:
    with pytest.raises(RunError, match=r"observer\.uri holds a password.*MLFLOW_TRACKING_PASSWORD") as error:
        load_config("preset:tiny", plugins=("observer=mlflow,uri=https://me:secret@127.0.0.1:9",))
    assert "secret@" not in str(error.value)
