"""The example service as a real server with real clients: many at once, killed, and asked for nonsense."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdpext_dask.runtime import City, open_city
from mdpext_dask.runtime.ledger import ReleaseBudget
from mdpext_dask.runtime.sticky import StickyKey
from tests.support.cities import PLANE, write_city
from tests.support.processes import Command, Processes, free_ports, processes_in, wait_until

aiohttp = pytest.importorskip("aiohttp", reason="needs pip install 'mdpext-dask[cloud]'")
pytest.importorskip("uvicorn", reason="needs pip install 'mdpext-dask[service]'")
PROJECT = Path(__file__).resolve().parents[2]
SERVICE = PROJECT / "workflows" / "service.py"
USERS = [f"secret name {k}" for k in range(200)]
# Status and document of an answer.
Answer = tuple[int, dict[str, Any]]
Ask = Callable[..., Awaitable[Answer]]


class Running:
    """A folder with a city, a key and a ledger, and servers that use them."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        self.file = write_city(folder / "city.mdp")
        self.city: City = open_city(self.file)
        self.key = StickyKey.generate()
        self.key.write(folder / "key")
        self.ledger = folder / "ledgers" / "ledger"
        self.ledger.parent.mkdir()
        # One for each of the records, which are 1 km from each other.
        grid = self.city.places.grid
        points = np.array([(x, y) for x in grid.x_km() for y in grid.y_km()])
        lonlat = PLANE.to_degrees(points).tolist()
        self.places = [{"lon": lon, "lat": lat} for lon, lat in lonlat]

    def start(self, *options: object) -> tuple[Command, str]:
        """Start a server and return it with its URL once it listens."""
        [started] = self.start_at_once(1, *options)
        return started

    def start_at_once(self, servers: int, *options: object) -> list[tuple[Command, str]]:
        """Start servers at the same time, so that all of them may make the ledger."""
        started, ports = [], free_ports(servers)
        for port in ports:
            files = ["--ledger", self.ledger, "--sticky-key", self.folder / "key", "--port", port]
            started.append(self.processes.start(sys.executable, SERVICE, self.file, *files, *options))

        def listens(command: Command, port: int) -> bool:
            assert not command.ended(), command.stderr
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        for command, port in zip(started, ports, strict=True):
            wait_until(partial(listens, command, port), command)
        return [(command, f"http://127.0.0.1:{port}") for command, port in zip(started, ports, strict=True)]

    def answer_of(self, user: str, place: dict[str, float]) -> dict[str, float]:
        """Return what the runtime itself answers by the key."""
        [[lon, lat]] = self.city.sample(**place, user=user, sticky=self.key)  # type: ignore[arg-type]
        return {"lon": lon, "lat": lat}

    def spent(self) -> list[int]:
        budget = ReleaseBudget(self.ledger)
        return [budget.spent(user) for user in USERS]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with processes_in(tmp_path) as processes:
        yield Running(tmp_path, processes)


def with_clients(work: Callable[[Ask], Awaitable[Any]], *urls: str) -> Any:
    """Run what asks servers, in turns, over as many connections as it takes."""

    async def run() -> Any:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            turn = 0

            async def ask(body: Any, method: str = "POST", path: str = "/report", **how: Any) -> Answer:
                nonlocal turn
                turn += 1
                content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
                url = urls[turn % len(urls)] + path
                async with session.request(method, url, data=content, **how) as answer:
                    assert answer.headers["Content-Type"] == "application/json"
                    return answer.status, await answer.json()

            return await work(ask)

    return asyncio.run(run())


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_many_users_at_once_get_what_the_limit_allows_and_no_more(running: Running, servers: int) -> None:
    """200 users, each of whom asks from five places at the same time, three of which are allowed."""
    started = running.start_at_once(servers, "--release-limit", 3)
    places = running.places[::7]

    async def everybody(ask: Ask) -> list[Answer]:
        return await asyncio.gather(*(ask(place | {"user": user}) for user in USERS for place in places))

    urls = [url for _, url in started]
    first = with_clients(everybody, *urls)
    assert running.spent() == [3] * len(USERS)
    second = with_clients(everybody, *urls)
    assert running.spent() == [3] * len(USERS)
    for k, user in enumerate(USERS):
        mine = first[k * len(places) : (k + 1) * len(places)]
        assert sorted(status for status, _ in mine) == [200, 200, 200, 429, 429]
        # Those that were paid for are answered again, with the same, and no others.
        assert second[k * len(places) : (k + 1) * len(places)] == mine
        for place, (status, document) in zip(places, mine, strict=True):
            if status == 200:
                assert document == running.answer_of(user, place)
            else:
                assert (document["error"], document["release_limit"]) == ("limit_reached", 3)
                assert "3 releases are used up; nothing was released" in document["message"]
    for command, _ in started:
        command.process.send_signal(signal.SIGTERM)
    # It ends by the signal, after it has closed the ledger, which is one file again.
    assert [command.code() for command, _ in started] == [-signal.SIGTERM] * servers
    assert [path.name for path in running.ledger.parent.iterdir()] == ["ledger"]
    # Nothing of what was asked and answered has been told to anybody else.
    assert [command.stdout + command.stderr for command, _ in started] == [""] * servers


@pytest.mark.slow
def test_kills_in_the_middle_lose_no_charge(running: Running) -> None:
    """Killed twice while 200 users report from everywhere; what was answered is paid, and answered again."""
    limit, places = 8, running.places[::2]
    answered: dict[tuple[str, int], dict[str, float]] = {}

    async def report(ask: Ask, user: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            status, document = await ask(places[number] | {"user": user})
            assert status in (200, 429), document
            if status == 200:
                assert answered.setdefault((user, number), document) == document

    async def until_killed(ask: Ask) -> None:
        everywhere = range(len(places))
        # Each in an order of their own.
        tasks = [
            asyncio.create_task(report(ask, user, [*everywhere[k % 18 :], *everywhere[: k % 18]]))
            for k, user in enumerate(USERS)
        ]
        enough = len(answered) + 500
        while len(answered) < enough:
            await asyncio.sleep(0.001)
        command.kill()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, aiohttp.ClientError) for error in ended), ended

    def most_answers_are_paid() -> None:
        spent = dict(zip(USERS, running.spent(), strict=True))
        for user in USERS:
            assert len([1 for name, _ in answered if name == user]) <= spent[user] <= limit

    for _ in range(2):
        command, url = running.start("--release-limit", limit)
        with_clients(until_killed, url)
        assert (running.ledger.parent / "ledger-wal").exists()  # nobody has tidied up
        most_answers_are_paid()
    before, spent = dict(answered), running.spent()
    command, url = running.start()

    async def again(ask: Ask) -> None:
        await asyncio.gather(*(report(ask, user, [number]) for user, number in before))

    with_clients(again, url)
    assert (answered, running.spent()) == (before, spent)  # the same answers, for nothing

    async def the_rest(ask: Ask) -> None:
        await asyncio.gather(*(report(ask, user, range(len(places))) for user in USERS))

    with_clients(the_rest, url)
    assert running.spent() == [limit] * len(USERS)
    most_answers_are_paid()
    (user, number), document = next(iter(answered.items()))
    assert document == running.answer_of(user, places[number])


GOOD = {"lon": -73.97, "lat": 40.78, "user": "anna"}
BAD: list[tuple[str, Any, int, str]] = [
    ("nothing", b"", 422, "one JSON object"),
    ("no JSON", b"lon=1&lat=2", 422, "one JSON object"),
    ("half", json.dumps(GOOD).encode()[:-3], 422, "one JSON object"),
    ("a list", [GOOD], 422, "one JSON object"),
    ("other letters", json.dumps(GOOD).encode("utf-16"), 422, "one JSON object"),
    ("deep", b"[" * 10_000, 422, "one JSON object"),
    ("NaN", b'{"lon": NaN, "lat": 40.78, "user": "anna"}', 422, "finite numbers"),
    ("infinity", b'{"lon": -Infinity, "lat": 40.78, "user": "anna"}', 422, "finite numbers"),
    (
        "overflow",
        b'{"lon": 1e999, "lat": 40.78, "user": "anna"}',
        422,
        "lon, lat: must be finite numbers of degrees",
    ),
    ("digits", b'{"lon": ' + b"9" * 5000 + b', "lat": 40.78, "user": "anna"}', 422, "one JSON object"),
    ("twice", b'{"lon": 1, "lon": -73.97, "lat": 40.78, "user": "anna"}', 422, "each key once"),
    ("text", GOOD | {"lon": "-73.97"}, 422, "lon, lat: must be finite numbers of degrees"),
    ("truth", GOOD | {"lat": True}, 422, "lon, lat: must be finite numbers of degrees"),
    ("list", GOOD | {"lat": [40.78]}, 422, "lon, lat: must be finite numbers of degrees"),
    ("null", GOOD | {"lat": None}, 422, "lon, lat: must be finite numbers"),
    ("range", GOOD | {"lat": 90.001}, 422, "lon, lat: must be finite numbers of degrees"),
    ("no place", {"user": "anna"}, 422, "must have lon, lat and user"),
    ("no user", {"lon": -73.97, "lat": 40.78}, 422, "must have lon, lat and user"),
    ("plane", {"x_km": 0, "y_km": 0, "user": "anna"}, 422, "must have lon, lat and user"),
    ("more", GOOD | {"n": 3}, 422, "must have lon, lat and user"),
    ("empty user", GOOD | {"user": ""}, 422, "user: must be a valid text"),
    ("number user", GOOD | {"user": 7}, 422, "user: must be a valid text"),
    ("surrogate", GOOD | {"user": "\ud800"}, 422, "user: must be a valid text"),
    ("long user", GOOD | {"user": "x" * 1001}, 422, "at most 1000 bytes"),
    ("huge", b" " * 1_000_000, 413, "at most"),
]


def test_nonsense_is_refused_and_the_server_stays(running: Running) -> None:
    command, url = running.start("--release-limit", 1)

    async def try_all(ask: Ask) -> None:
        for name, body, status, message in BAD:
            found = await ask(body)
            assert (found[0], message in found[1]["message"]) == (status, True), (name, found)
            assert len(found[1]["message"].splitlines()) == 1
            # Nothing of what was sent is sent back.
            assert not any(value in found[1]["message"] for value in ("73", "40.78", "90.0", "anna", "xx"))
        for method, path, status in (
            ("GET", "/report", 405), ("PUT", "/report", 405), ("POST", "/health", 405), ("GET", "/", 404),
            ("POST", "/report/", 404),
        ):  # fmt: skip
            assert (await ask(GOOD, method, path))[0] == status
        status, found = await ask(None, "GET", "/health")
        city = running.city
        assert status == 200
        assert found == {
            "status": "ok", "mechanism_sha256": city.mechanism_sha256, "epsilon_per_km": 1.0,
            "quantisation_km": city.quantisation_km(), "release_limit": 1, "key_id": running.key.key_id,
        }  # fmt: skip
        assert await ask(GOOD) == (200, running.answer_of("anna", {"lon": -73.97, "lat": 40.78}))

    with_clients(try_all, url)
    # A request that says it is longer than it is, and one that is no HTTP at all.
    port = int(url.rpartition(":")[2])
    half = b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    for sent in (half, b"\x16\x03\x01 no HTTP\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent)
    # The one release was the good one.
    assert with_clients(lambda ask: ask(GOOD | {"lon": -73.95}), url)[0] == 429
    assert ReleaseBudget(running.ledger).spent("anna") == 1
    assert not command.ended()


def test_a_proxy_may_say_who_it_is_and_places_outside_may_be_refused(running: Running) -> None:
    _, url = running.start("--release-limit", 2, "--user-header", "X-User", "--outside", "error")
    inside = {"lon": -73.97, "lat": 40.78}

    async def work(ask: Ask) -> None:
        anna = {"headers": {"x-user": "anna"}}
        assert await ask(inside, **anna) == (200, running.answer_of("anna", inside))
        status, found = await ask({"lon": 0, "lat": 0}, **anna)
        assert (status, found["error"]) == (422, "outside")
        twice = [("x-user", "ben"), ("x-user", "anna")]
        for body, headers in (
            (inside, {}), (GOOD, {"x-user": "anna"}), (inside, {"x-user": ""}), (inside, twice),
        ):  # fmt: skip
            status, found = await ask(body, headers=headers)
            assert (status, found["error"]) == (422, "bad_request")
            assert "user" in found["message"]

    with_clients(work, url)
    assert ReleaseBudget(running.ledger).spent("anna") == 1


def test_places_of_a_plane_and_coarse_places(running: Running) -> None:
    running.file = PROJECT / "tests" / "runtime" / "vectors" / "rows-planar.mdp"
    city = open_city(running.file)
    x, y = (float(axis[1]) for axis in (city.places.grid.x_km(), city.places.grid.y_km()))
    _, url = running.start("--release-limit", 1, "--place-km", 3)

    async def work(ask: Ask) -> None:
        answers = [await ask({"x_km": x + moved, "y_km": y, "user": "anna"}) for moved in (0.01, -0.01)]
        [[east, north]] = city.sample(x_km=x, y_km=y, user="anna", sticky=running.key, place_km=3.0)
        assert answers == [(200, {"x_km": east, "y_km": north})] * 2
        assert (await ask(GOOD))[0] == 422
        status, found = await ask({"x_km": x, "y_km": str(y), "user": "anna"})
        assert (status, found["message"]) == (422, "x_km, y_km: must be finite numbers of km")
        assert (await ask(None, "GET", "/health"))[1]["quantisation_km"] == city.quantisation_km(3.0)

    with_clients(work, url)
    assert ReleaseBudget(running.ledger).spent("anna") == 1


def test_without_its_ledger_it_releases_nothing(running: Running) -> None:
    command, url = running.start("--release-limit", 2)
    assert with_clients(lambda ask: ask(GOOD), url)[0] == 200
    running.ledger.unlink()

    async def work(ask: Ask) -> None:
        status, found = await ask(GOOD | {"lon": -73.95})
        assert (status, found["error"]) == (503, "unavailable")
        assert "lon" not in found
        assert (await ask(None, "GET", "/health"))[0] == 503

    with_clients(work, url)
    assert command.stderr.startswith(f"error: {running.ledger}: has been moved, deleted or replaced")
    assert len(command.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [((), 2, "a new one needs a release limit"), (("--release-limit", 0), 2, "release limit: must be"),
     (("--release-limit", 1, "--place-km", -1), 2, "place_km"),
     (("--release-limit", 1, "--trusted-key", "00" * 32), 1, "sign")],
)  # fmt: skip
def test_what_it_cannot_start_with_is_one_line(
    running: Running, options: Any, code: int, message: str
) -> None:
    files = ["--ledger", running.ledger, "--sticky-key", running.folder / "key", "--port", 1]
    command = running.processes.start(sys.executable, SERVICE, running.file, *files, *options)
    assert command.code() == code
    assert command.stderr.startswith("error: ")
    assert message in command.stderr
    assert len(command.stderr.splitlines()) == 1
