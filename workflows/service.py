"""A service that blurs places, over HTTP: an example, with a ledger and sticky answers.

    mdpext export STORE -o city.mdp
    mdpext sticky-key sticky.key
    python workflows/service.py city.mdp --ledger releases.db --release-limit 20 --sticky-key sticky.key

    curl -d '{"lon": -73.98, "lat": 40.75, "user": "anna"}' http://127.0.0.1:8000/report
    {"lon":-73.9795,"lat":40.7531}

It needs ``pip install 'mdpext-dask[service]'``. Read ``docs/server.md`` first: whoever runs this has every
true place, so **the device is the better place** to draw reports (``deploy/browser/``).

Every report is charged on the disk before it is drawn. Requests that arrive while charges are written wait
together and are written together, each charged or refused by itself, so that many users wait for the disk no
longer than one. A user who asks again from the same place gets the same answer, which costs nothing: a client
that has lost an answer asks again. Nothing is logged about requests: no place, answer, user or address.

``POST /report`` takes ``{"lon", "lat", "user"}`` (``x_km`` and ``y_km`` of a planar city) and answers 200
with the reported place; 429 where the user's releases are used up; 422, 413, 405 or 404 where the request is
wrong; 503 where the ledger cannot be written or too many wait. ``GET /health`` says whether charges are
written, and what is promised. Errors are ``{"error", "message"}``.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from mdpext_dask.errors import MdpextError, SpecError, exit_code_of
from mdpext_dask.runtime import City, open_city
from mdpext_dask.runtime.ledger import HeldLedger, ReleaseBudget
from mdpext_dask.runtime.sticky import StickyKey, encoded_user

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# What is answered: the status and the JSON document.
Answer = tuple[int, dict[str, Any]]

_LARGEST_BODY = 16_384
_MOST_WAITING = 5_000
_SHUTDOWN_SECONDS = 10
# Longer than proxies keep connections that are not in use, so that they are the ones who close them.
_KEEP_ALIVE_SECONDS = 120
_METHODS = {"/report": "POST", "/health": "GET"}


class Service:
    """An ASGI application.

    Parameters
    ----------
    city
        Where reports are drawn from.
    budget
        The ledger, which has the limit.
    sticky
        The key that answers repeat by.
    outside
        Whether a place outside is reported from the nearest record, ``"nearest"``, or refused, ``"error"``.
    place_km
        Side of coarse places, in km; see :meth:`City.sample`.
    user_header
        Lower-case name of the header in which a proxy says who has been authenticated, instead of ``user`` in
        the body.
    """

    def __init__(
        self,
        city: City,
        budget: ReleaseBudget,
        sticky: StickyKey,
        *,
        outside: str = "nearest",
        place_km: float | None = None,
        user_header: str | None = None,
    ) -> None:
        self._city, self._budget, self._sticky = city, budget, sticky
        self._outside, self._place_km, self._user_header = outside, place_km, user_header
        city.quantisation_km(place_km)  # refuses a side that is none
        self._coordinates = ("x_km", "y_km") if city.planar else ("lon", "lat")
        self._reported = (city.output_xy_km if city.planar else city.output_lonlat).tolist()
        message = (
            f"this user's {budget.limit} releases are used up; nothing was released or charged. Places that "
            "were reported before are still answered"
        )
        facts = {"release_limit": budget.limit, "epsilon_per_km": city.epsilon_per_km}
        self._used_up: Answer = 429, {"error": "limit_reached", "message": message, **facts}
        self._waiting: list[tuple[tuple[float, float], str, asyncio.Future[Answer]]] = []
        self._arrived = asyncio.Event()
        self._writes = True
        # SQLite's connection and all draws are of this one thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="charges")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or start and stop with the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            status, document = await self._answer(scope, receive)
            content = json.dumps(document, separators=(",", ":")).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                (b"cache-control", b"no-store"),
            ]
            if status == 405:
                headers.append((b"allow", _METHODS[scope["path"]].encode()))
            if status == 413:
                headers.append((b"connection", b"close"))  # the rest of the body is not read
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: Message, receive: Receive) -> Answer:
        path, method = scope["path"], scope["method"]
        if path not in _METHODS:
            return _refusal(404, "not_found", "there are POST /report and GET /health")
        if method != _METHODS[path]:
            return _refusal(405, "method_not_allowed", f"{path} takes {_METHODS[path]}")
        if path == "/health":
            return self._health()
        try:
            body = await _body(receive)
            if body is None:
                return _refusal(413, "too_large", f"a request has at most {_LARGEST_BODY} bytes")
            place, user = self._understood(body, scope["headers"])
        except SpecError as error:
            return _refusal(422, "bad_request", str(error))
        if len(self._waiting) >= _MOST_WAITING:
            return _refusal(503, "busy", "too many requests are waiting; nothing was charged; try again")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, user, answer))
        self._arrived.set()
        return await answer

    def _understood(
        self, body: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[tuple[float, float], str]:
        """Return a request's place, in the plane, and its user.

        Raises
        ------
        SpecError
            Says what is wrong.
        """
        asked = _document(body)
        first, second = self._coordinates
        if self._user_header is not None:
            if "user" in asked:
                raise SpecError("user: is not taken from the body; the proxy says who it is")
            names = [value for name, value in headers if name == self._user_header.encode()]
            if len(names) != 1:
                raise SpecError(f"user: must be in one header {self._user_header}, found {len(names)}")
            asked["user"] = names[0].decode(errors="surrogateescape")
        if asked.keys() != {first, second, "user"}:
            raise SpecError(f"the body must have {first}, {second} and user, and nothing else")
        # Errors of the package show what they got; answers get kept, and must not hold a true place.
        try:
            encoded_user(asked["user"])
        except SpecError:
            raise SpecError("user: must be a valid text, not empty, and of at most 1000 bytes") from None
        found = {name: asked[name] for name in self._coordinates}
        nothing: dict[str, Any] = dict.fromkeys(("lon", "lat", "x_km", "y_km"))
        try:
            return self._city.places.one(**nothing | found), asked["user"]
        except SpecError:
            unit = "km" if self._city.planar else "degrees, from -180 to 180 and from -90 to 90"
            raise SpecError(f"{first}, {second}: must be finite numbers of {unit}") from None

    def _health(self) -> Answer:
        return (200 if self._writes else 503), {
            "status": "ok" if self._writes else "the last charges could not be written",
            "mechanism_sha256": self._city.mechanism_sha256,
            "epsilon_per_km": self._city.epsilon_per_km,
            "quantisation_km": self._city.quantisation_km(self._place_km),
            "release_limit": self._budget.limit,
            "key_id": self._sticky.key_id,
        }

    # --- charges ----------------------------------------------------------------------------------

    async def _live(self, receive: Receive, send: Send) -> None:
        """Hold the ledger from the server's start to its end, and answer those who wait."""
        loop, stack = asyncio.get_running_loop(), contextlib.ExitStack()
        await receive()
        try:
            ledger = await loop.run_in_executor(self._thread, stack.enter_context, self._budget.held())
        except MdpextError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        answering = asyncio.create_task(self._answer_those_who_wait(ledger))
        await send({"type": "lifespan.startup.complete"})
        await receive()  # all requests have been answered by now, or given up
        answering.cancel()
        await loop.run_in_executor(self._thread, stack.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer_those_who_wait(self, ledger: HeldLedger) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            group, self._waiting = self._waiting, []
            places, users = [place for place, _, _ in group], [user for _, user, _ in group]
            found = await loop.run_in_executor(self._thread, self._reports, ledger, places, users)
            for (_, _, answer), one in zip(group, found, strict=True):
                if not answer.done():  # whose client has gone
                    answer.set_result(one)

    def _reports(
        self, ledger: HeldLedger, places: Sequence[tuple[float, float]], users: Sequence[str]
    ) -> list[Answer]:
        """Charge and draw for requests that have arrived together."""
        city = self._city
        try:
            outputs, was_outside = city.sample_places(
                np.array(places),
                outside="drop" if self._outside == "error" else "nearest",
                users=users,
                sticky=self._sticky,
                budget=ledger,
                place_km=self._place_km,
            )
        except Exception as error:
            self._writes = False
            # What is ours to say names files and no user; of anything else the kind is enough.
            said = str(error) if isinstance(error, MdpextError) else type(error).__name__
            print(f"error: {said}", file=sys.stderr, flush=True)
            refusal = _refusal(503, "unavailable", "no report can be made now; nothing was released")
            return [refusal] * len(users)
        self._writes = True
        answers: list[Answer] = []
        for output, outer in zip(outputs.tolist(), was_outside.tolist(), strict=True):
            if output >= 0:
                answers.append((200, dict(zip(self._coordinates, self._reported[output], strict=True))))
            elif outer and self._outside == "error":
                answers.append(
                    _refusal(422, "outside", "the place lies outside the region; nothing was charged")
                )
            else:
                answers.append(self._used_up)
        return answers


def _refusal(status: int, error: str, message: str) -> Answer:
    return status, {"error": error, "message": message}


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request; None where it is too large."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise SpecError("the request was cut short")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > _LARGEST_BODY:
            return None
    return body


def _document(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises
    ------
    SpecError
        If it is none; NaN and infinities are no JSON, and a key that is given twice has two meanings.
    """

    def no_number(name: str) -> float:
        raise ValueError(name)

    def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return found

    try:
        found = json.loads(body.decode(), parse_constant=no_number, object_pairs_hook=each_once)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SpecError("the body must be one JSON object in UTF-8, with finite numbers and each key once")
    return found


def main() -> None:
    """Read the arguments, open what they name, and serve until a signal."""
    parser = argparse.ArgumentParser(description="A service that blurs places; see docs/server.md.")
    parser.add_argument("city", help="exported by mdpext export")
    parser.add_argument("--ledger", required=True, type=Path, help="made where there is none")
    parser.add_argument("--release-limit", type=int, help="for each user; a new ledger needs it")
    parser.add_argument("--sticky-key", required=True, help="made by mdpext sticky-key")
    parser.add_argument("--user-header", help="in which the proxy says who asks; default: user in the body")
    parser.add_argument("--outside", choices=("nearest", "error"), default="nearest")
    parser.add_argument("--place-km", type=float, help="side of coarse places")
    parser.add_argument("--trusted-key", help="public key that must have signed the city")
    parser.add_argument("--cache-mib", type=int, default=256, help="how much of the city is kept in memory")
    parser.add_argument("--host", default="127.0.0.1", help="without TLS: behind a proxy, no other than this")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        service = Service(
            open_city(
                given.city, trusted_key=given.trusted_key, cache_bytes=given.cache_mib * 2**20, verify=True
            ),
            ReleaseBudget(given.ledger, given.release_limit),
            StickyKey.read(given.sticky_key),
            outside=given.outside,
            place_km=given.place_km,
            user_header=given.user_header and given.user_header.lower(),
        )
    except MdpextError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    uvicorn.run(
        service,
        host=given.host,
        port=given.port,
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    )


if __name__ == "__main__":
    main()
