"""Running tasks on workers: how many at once, under which names, with which software and settings."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mdpext_dask.compute import executor as cluster_module
from mdpext_dask.compute import workers as workers_module
from mdpext_dask.compute.dask_settings import DASK_CONFIG, settings_under
from mdpext_dask.compute.executor import DaskExecutor, open_executor
from mdpext_dask.compute.workers import slurm_time
from mdpext_dask.errors import ClusterError, SpecError, StoreError
from mdpext_dask.job.sections import ClusterSection
from mdpext_dask.store.mechanism_store import MechanismStore


def double(number: int) -> int:
    return 2 * number


def opened(**section: Any) -> None:
    """Open and close the executor of a section."""
    with open_executor(ClusterSection(**section)):
        pass


def _settles(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def client(scheduler_address: str) -> Iterator[Any]:
    from distributed import Client

    with Client(scheduler_address) as client:
        yield client


@pytest.fixture
def executor(client: Any) -> DaskExecutor:
    return DaskExecutor(client, on_this_machine=False)


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "WINDOW", 8)
    monkeypatch.setattr(cluster_module, "WINDOW_OF_WORKER", 1)


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 60])
def test_every_task_is_done_once_though_few_are_held_at_a_time(
    client: Any, executor: DaskExecutor, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    sizes, submit = [], client.map
    monkeypatch.setattr(client, "map", lambda *a, **k: (sizes.append(len(k["key"])), submit(*a, **k))[1])
    found = list(executor.map("double", double, [(n,) for n in range(count)]))
    assert sorted(found) == [(n, 2 * n) for n in range(count)]
    assert sum(sizes) == count
    assert max(sizes, default=0) <= 8
    assert len(sizes) <= 1 + max(count - 8, 0) / 4 + 1


@pytest.mark.usefixtures("small_window")
def test_no_more_than_a_window_is_with_the_scheduler(client: Any, executor: DaskExecutor) -> None:
    results = executor.map("double", double, [(n,) for n in range(100)])
    for _ in range(50):
        next(results)
    # What comes next is not asked for before somebody takes it.
    assert _settles(lambda: len(client.futures) <= 8)
    assert len(list(results)) == 50
    assert _settles(lambda: not client.futures)


def test_stages_go_by_their_names_on_the_dashboard(client: Any, executor: DaskExecutor) -> None:
    from dask.utils import key_split

    def stages(dask_scheduler: Any) -> list[tuple[str, Any]]:
        return [(key, (task.annotations or {}).get("stage")) for key, task in dask_scheduler.tasks.items()]

    for stage in ("extend", "audit", "lower bound"):
        generator = executor.map(stage, double, [(1,), (2,)])
        next(generator)
        seen = {(key_split(key), noted) for key, noted in client.run_on_scheduler(stages)}
        generator.close()  # type: ignore[attr-defined]
        assert (stage, stage) in seen


def test_closing_in_the_middle_lets_go_of_everything(client: Any, executor: DaskExecutor) -> None:
    generator = executor.map("double", double, [(n,) for n in range(50)])
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert _settles(lambda: not client.futures)


def test_a_worker_with_other_software(client: Any, executor: DaskExecutor, monkeypatch: Any) -> None:
    executor.check_versions()
    theirs = cluster_module.versions()
    assert theirs["python"].count(".") == 1  # its last number decides nothing
    monkeypatch.setattr(cluster_module, "versions", lambda: {**theirs, "zarr": "0.0.1"})
    executor = DaskExecutor(client, on_this_machine=False)
    # One that joins after the check is refused by its own first task.
    with pytest.raises(SpecError, match=rf"worker tcp://\S+ has zarr {theirs['zarr']} instead of 0\.0\.1"):
        list(executor.map("double", double, [(1,)]))


def test_a_scheduler_file_is_as_good_as_an_address(scheduler_address: str, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(f'{{"address": "{scheduler_address}"}}')
    with open_executor(ClusterSection(kind="address", address=str(file))) as executor:
        assert dict(executor.map("double", double, [(4,)])) == {0: 8}
        assert executor.dashboard is not None
        assert executor.memory_bytes is not None


@pytest.mark.parametrize("content", [None, "", "{}", '{"address": 3}', "[1]"])
def test_a_scheduler_file_that_is_none_is_one_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "scheduler.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ClusterError, match=r"cluster\.address: .*scheduler\.json"):
        opened(kind="address", address=str(file))


@pytest.mark.parametrize("hangs_up", [True, False])
def test_an_address_where_nobody_answers(monkeypatch: pytest.MonkeyPatch, hangs_up: bool) -> None:
    """As of a scheduler that is frozen, or of a server of another kind, which waits for others to speak."""
    monkeypatch.setattr(workers_module, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        if hangs_up:
            threading.Thread(target=lambda: server.accept()[0].close()).start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no scheduler with workers answers at {address}: .+"):
            opened(kind="address", address=address)


def test_what_the_machine_s_own_settings_say_is_left_alone() -> None:
    assert settings_under({}) == DASK_CONFIG
    own = {"distributed": {"scheduler": {"worker_ttl": "5s"}, "worker": {"memory": {"pause": 0.5}}}}
    left = {"distributed.scheduler.worker-ttl", "distributed.worker.memory.pause"}
    assert set(DASK_CONFIG) - set(settings_under(own)) == left
    assert not any("memory" in key for key in settings_under({"distributed": {"worker": {"memory": False}}}))


@pytest.mark.parametrize(
    ("hours", "text"),
    [(1.0, "1:00:00"), (0.5, "0:30:00"), (1 / 3600, "0:01:00"), (30.01, "30:01:00"), (0.1, "0:06:00")],
)
def test_a_time_limit_is_told_in_whole_minutes_rounded_up(hours: float, text: str) -> None:
    assert slurm_time(hours) == text


def test_local_workers_have_the_memory_they_are_given_or_their_share() -> None:
    from distributed import system

    with open_executor(ClusterSection(kind="local", workers=1, memory_gib=1.5)) as executor:
        assert executor.memory_bytes == 1.5 * 2**30
    # However many processors there are.
    with open_executor(ClusterSection(kind="local", workers=1)) as executor:
        assert executor.memory_bytes == system.MEMORY_LIMIT


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (ClusterSection(kind="kubernetes", image="example/mdpext:1"), "Kubernetes does not answer: "),
        (ClusterSection(kind="slurm", memory_gib=1.0), "Slurm: "),
    ],
)
def test_no_such_cluster(tmp_path: Path, monkeypatch: Any, section: ClusterSection, said: str) -> None:
    # Neither a Slurm nor a Kubernetes that this machine may have.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ClusterError, match=f"^cluster: {said}.+") as caught, open_executor(section):
        pass
    assert len(str(caught.value).splitlines()) == 1


def test_workers_from_slurm_need_to_be_told_their_memory() -> None:
    with pytest.raises(SpecError, match=r"cluster\.memory_gib: how much"):
        opened(kind="slurm")


def test_an_error_in_a_worker_is_the_same_error_here(scheduler_address: str) -> None:
    """Although what it came from, an error of Zarr's, cannot be sent."""
    with open_executor(ClusterSection(kind="address", address=scheduler_address)) as executor:
        with pytest.raises(StoreError, match=r"^memory://nothing: not a mechanism store") as error:
            list(executor.map("open", MechanismStore.open, [("memory://nothing",)]))
        assert type(error.value) is StoreError
