"""Streamed chunks per second that one Locust process reads on time, beside a bare socket and Locust's own reader.

    python benchmarks/load_reader.py [--seconds 3] [--lag-ms 10]

A process streams token chunks as an engine does, one every 10 ms and stream, each with the instant at which it was
written; another one reads them with gevent and says how late. Streams are added until the 99th percentile of that
lateness passes the limit, or fewer chunks are read than were written: by halves, down to an eighth. Readers:

- bare: `recv` on a gevent socket, nothing parsed but the first stamp of each piece
- ours: Locust's client with our reader, every chunk parsed and filed as a row needs it
- iter_lines: Locust's own `FastHttpSession.iter_lines`, every line parsed

All run one after the other on one machine; its two cores are for the writer and the reader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

READERS = ("bare", "ours", "iter_lines")
PACE_MS = 10
WARM_S = 0.5
KEPT = 0.95
"""Share of what was written that must have been read: less is a reader that falls behind."""
TRIALS = 3
"""So often must a reader be late: something else may have had the core once."""
STREAMS_START, STREAMS_MAX = 32, 2048
CLOSENESS = 1 / 8
"""How closely the limit is found."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"%019d",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]}\n\n'
)
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def framed(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


# -- the writer, in a process of its own ---------------------------------------------------------------------------


class Writer:
    """Writes to every open stream once in `PACE_MS`, spread evenly over its milliseconds."""

    def __init__(self) -> None:
        self.open: list[list[asyncio.StreamWriter]] = [[] for _ in range(PACE_MS)]
        self.count = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            place = self.open[self.count % PACE_MS]
            self.count += 1
            place.append(writer)
            await reader.read(-1)  # until the reader hangs up
            place.remove(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def tick(self) -> None:
        turn, due = 0, time.monotonic()
        while True:
            for writer in self.open[turn % PACE_MS]:
                if not writer.transport.is_closing():
                    writer.write(framed(CHUNK % time.monotonic_ns()))
            turn, due = turn + 1, due + 0.001
            await asyncio.sleep(max(0.0, due - time.monotonic()))


async def serve() -> None:
    writer = Writer()
    server = await asyncio.start_server(writer.answer, "127.0.0.1", 0, backlog=STREAMS_MAX)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.gather(writer.tick(), server.serve_forever())


@contextmanager
def served() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


# -- the readers, each in a process of its own -----------------------------------------------------------------------


def read(kind: str, port: int, streams: int, seconds: float) -> None:
    """Reads for a while and prints what it saw. Locust patches the process, so it is imported here."""
    import gevent
    from locust.env import Environment

    from harness.sse import TokenMeter, read_stream
    from harness.users import LoadUser

    lags: list[int] = []
    clock = time.monotonic_ns
    user_class = type("Reader", (LoadUser,), {"host": f"http://127.0.0.1:{port}"})
    environment = Environment(user_classes=[user_class])

    class Stamped(TokenMeter):
        def _token(self, choice, at_ns):  # type: ignore[no-untyped-def]
            super()._token(choice, at_ns)
            lags.append(at_ns - int(choice.text))

    def ours() -> None:
        client = user_class(environment).client
        with client.post("/v1/completions", data=b"{}", stream=True, catch_response=True) as answer:
            read_stream(answer._response, Stamped())

    def iter_lines() -> None:
        client = user_class(environment).client
        for line in client.iter_lines("/v1/completions", method="POST", data=b"{}"):
            if line.startswith("data: "):
                lags.append(clock() - int(json.loads(line[6:])["choices"][0]["text"]))

    def bare() -> None:
        sock = gevent.socket.create_connection(("127.0.0.1", port))
        sock.sendall(ASK)
        while piece := sock.recv(65_536):
            now, found = clock(), piece.count(b'"text":"')
            if found:
                at = piece.index(b'"text":"') + 8
                lags.extend([now - int(piece[at : at + 19])] * found)

    reading = {"bare": bare, "ours": ours, "iter_lines": iter_lines}[kind]
    greenlets = [gevent.spawn(reading) for _ in range(streams)]
    gevent.sleep(WARM_S + streams / 1000)
    lags.clear()
    started, cpu = time.monotonic(), time.process_time()
    gevent.sleep(seconds)
    seen, wall, spent = sorted(lags), time.monotonic() - started, time.process_time() - cpu
    gevent.killall(greenlets, block=False)
    count = len(seen)
    print(
        json.dumps(
            {
                "per_s": count / wall,
                "lag_ms_p50": seen[count // 2] / 1e6 if seen else None,
                "lag_ms_p99": seen[int(0.99 * count)] / 1e6 if seen else None,
                "cpu_us": 1e6 * spent / max(count, 1),
            }
        ),
        flush=True,
    )


@dataclass(frozen=True)
class Seen:
    streams: int
    per_s: float
    lag_ms_p50: float
    lag_ms_p99: float
    cpu_us: float


def try_with(kind: str, streams: int, seconds: float) -> Seen:
    with served() as port:
        command = [sys.executable, __file__, "--read", kind, str(port), str(streams), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise SystemExit(f"the reader {kind} failed:\n{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    return Seen(streams, said["per_s"], said["lag_ms_p50"] or 0, said["lag_ms_p99"] or float("inf"), said["cpu_us"])


def most_on_time(kind: str, seconds: float, lag_ms: float) -> tuple[Seen, Seen | None]:
    """(the first trial, the largest one on time or None)."""

    def on_time(seen: Seen) -> bool:
        return seen.lag_ms_p99 < lag_ms and seen.per_s >= KEPT * seen.streams * 1000 / PACE_MS

    def best_of_some(streams: int) -> Seen:
        for _ in range(TRIALS):
            seen = try_with(kind, streams, seconds)
            if on_time(seen):
                break
        return seen

    first = seen = best_of_some(STREAMS_START)
    best = None
    while on_time(seen) and seen.streams < STREAMS_MAX:
        best, seen = seen, best_of_some(2 * seen.streams)
    if best is None:
        return first, None
    low, high = best.streams, seen.streams
    while high - low > low * CLOSENESS:
        seen = best_of_some((low + high) // 2)
        if on_time(seen):
            best, low = seen, seen.streams
        else:
            high = seen.streams
    return first, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each trial")
    parser.add_argument("--lag-ms", type=float, default=10.0, help="99th percentile that counts as on time")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    if args.read:
        kind, port, streams, seconds = args.read
        read(kind, int(port), int(streams), float(seconds))
        return
    print(
        f"lag at {STREAMS_START} streams of {1000 // PACE_MS} chunks/s; most chunks/s with lag p99 < {args.lag_ms:g} ms"
    )
    print(f"{'':12}{'lag p50 ms':>12}{'lag p99 ms':>12}{'CPU us/chunk':>14}{'most chunks/s':>15}{'of bare':>9}")
    bare_per_s: float | None = None
    for kind in READERS:
        first, best = most_on_time(kind, args.seconds, args.lag_ms)
        bare_per_s = best.per_s if kind == "bare" and best else bare_per_s
        most = f"{best.per_s:15,.0f}" if best else f"{'never':>15}"
        ratio = f"{best.per_s / bare_per_s:9.2f}" if best and bare_per_s else f"{'-':>9}"
        cpu = (best or first).cpu_us
        print(f"{kind:12}{first.lag_ms_p50:12.2f}{first.lag_ms_p99:12.2f}{cpu:14.1f}{most}{ratio}", flush=True)


if __name__ == "__main__":
    main()
