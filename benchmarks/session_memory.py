"""Resident memory of one load process with 10,000 concurrent sessions, beside bare greenlets with a socket each.

    python benchmarks/session_memory.py [--sessions 10000] [--few 200] [--prompt-tokens 500]

A process answers every request with one token and then holds the stream open until all sessions have one in flight;
there the load process is measured. The load process is Locust with our locustfile, started as a run starts it, on
conversations of two turns. What a session costs is the difference between many and few sessions, divided by their
number, so that the interpreter and Locust itself are not in it. `ulimit -Hn` must allow as many sockets a process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from harness.load_plan import LoadPlan
from harness.processes import PYTHON, Children, free_ports, get_json

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" a"}]}\n\n'
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
POLL_S, SETTLE_S = 0.1, 1.0
WAIT_S_MAX = 300


def framed(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


# -- the holder, in a process of its own ------------------------------------------------------------------------------


async def serve(port: int) -> None:
    """Holds every stream open after its first token; a GET is told how many there are."""
    held = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get"):
                said = b'{"held": %d}' % held
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(said), said)
                )
                writer.close()
                return
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            writer.write(HEAD + framed(TOKEN))
            held += 1
            await reader.read(-1)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# -- the two kinds of sessions ---------------------------------------------------------------------------------------


def hold_bare(port: int, count: int) -> None:
    """Greenlets that each wait on a socket, and nothing else."""
    from gevent import monkey

    monkey.patch_all()
    import gevent
    from gevent import socket

    def hold() -> None:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(ASK)
        while sock.recv(65_536):
            pass

    gevent.joinall([gevent.spawn(hold) for _ in range(count)])


def load_command(folder: Path, url: str, count: int, prompt_tokens: int) -> list[str]:
    from harness.live import locust_command  # not in the bare process, whose memory is measured

    workload = {"kind": "multi-turn", "sessions": count, "turns": 2, "first_input_tokens": prompt_tokens}
    plan = LoadPlan(
        workload=workload,
        seed=1,
        rows_dir=str(folder / "rows"),
        epoch_ns=time.monotonic_ns(),
        concurrency=count,
        request_timeout_s=2 * WAIT_S_MAX,
    )
    place = folder / "plan.json"
    place.write_bytes(msgspec.json.encode(plan))
    return locust_command(place, url, count)


def resident(kind: str, count: int, prompt_tokens: int) -> tuple[float, float]:
    """(bytes resident with so many sessions in flight, seconds until they were)."""
    with tempfile.TemporaryDirectory() as place, Children(Path(place)) as children:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        children.start("holder", [*PYTHON, __file__, "--serve", str(port)])
        until(children, url, 0)
        command = [*PYTHON, __file__, "--bare", str(port), str(count)]
        if kind == "ours":
            command = load_command(Path(place), url, count, prompt_tokens)
        begun = time.monotonic()
        load = children.start("load", command)
        until(children, url, count)
        taken = time.monotonic() - begun
        time.sleep(SETTLE_S)
        return float(psutil.Process(load.process.pid).memory_info().rss), taken


def until(children: Children, url: str, count: int) -> None:
    """Waits until the holder holds so many streams."""
    deadline = time.monotonic() + WAIT_S_MAX
    while True:
        children.require_alive()
        with contextlib.suppress(OSError):
            if get_json(url)["held"] >= count:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{count} streams were not open within {WAIT_S_MAX} s: {children.find('load').tail()}")
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--few", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve))
        return
    if args.bare:
        hold_bare(*args.bare)
        return
    if not 0 < args.few < args.sessions:
        parser.error(f"--few {args.few}: give less than --sessions {args.sessions}")
    print(f"{'':34}{'few MB':>8}{'many MB':>9}{'seconds':>9}{'KB a session':>14}{'ratio':>7}")
    base = None
    for kind, name in (("bare", "greenlets with a socket"), ("ours", "sessions in Locust")):
        few, _ = resident(kind, args.few, args.prompt_tokens)
        many, taken = resident(kind, args.sessions, args.prompt_tokens)
        each = (many - few) / (args.sessions - args.few)
        base = base or each
        label = f"{args.sessions:,} {name}"
        print(f"{label:34}{few / 1e6:8.0f}{many / 1e6:9.0f}{taken:9.1f}{each / 1e3:14.1f}{each / base:7.2f}")


if __name__ == "__main__":
    main()
