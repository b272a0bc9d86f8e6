"""Whether the page stays up under a crowd that comes, streams, cancels and vanishes as it likes.

    python tests/bench/load.py [--clients 300] [--seconds 600] [--model FOLDER | --tiny]

The real app and clients over raw sockets, each from a network address of its own. Every client does one thing after
another: reads an answer to its end, leaves in the middle, cancels, asks and never reads, reads and stops reading,
chats as the page does, or looks at the page. Answers are compared, token by token, with those of the idle engine.

Exit status 1 if anything was lost, stuck, left over, or refused with another sentence than "come back in about N s".
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import psutil
from running_app import ApiError, EventParser, RunningApp, generate_data, running_app, save_talkative_model, stream

BUSY = re.compile(r"The line is full: \d+ requests? (is|are) waiting\. Come back in about \d+ s\.")
IN_LINE = re.compile(r"\b\d+(st|nd|rd|th) in line")
PROMPTS = (
    "Once upon a time",
    "The lighthouse stood",
    "A recipe for bread:",
    "Dear visitor,",
    "In the beginning",
    "é🔭",
)
QUIET_S = 60.0  # without a word, and a stream counts as stuck: even who waits in line is told so each second
LONGEST_S = 1800.0  # from the question to the end of its answer, all the line before it included
SETTLE_S = 30.0  # for threads that are kept for the next call
PAUSE_S = 0.5  # of a client that was told to come back; a real one would wait longer
SAMPLE_S = 5.0
SPARE = 2  # threads and sockets that come and go
GROWTH_MB = 48  # of memory that a run may add after its first third, to the web server or to its worker
WEIGHTS = {"read": 8, "leave": 3, "cancel": 2, "never_read": 1, "stop_reading": 1, "chat": 3, "look": 2}


@dataclass
class Outcome:
    """What a run saw; `wrong` has a line for everything that must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    places_seen: int = 0

    def require(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.wrong[sentence] += 1


@dataclass(frozen=True)
class Question:
    """A call whose answer is known."""

    data: list[Any]
    token_ids: list[int]
    text: str


class Client:
    """One visitor: an address, a habit and a dice."""

    def __init__(
        self, number: int, app: RunningApp, questions: list[Question], events: dict[str, int], outcome: Outcome
    ):
        self.dice = random.Random(number)
        self.address = f"10.{number // 62500}.{number // 250 % 250}.{number % 250 + 1}"
        self.session = f"load{number}"
        self.app, self.questions, self.events, self.outcome = app, questions, events, outcome

    async def live(self, until: float) -> None:
        """One thing after another, until that moment of the monotonic clock."""
        await asyncio.sleep(self.dice.random() * 3)
        while time.monotonic() < until:
            what = self.dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            try:
                async with asyncio.timeout(LONGEST_S):
                    await getattr(self, what)()
                self.outcome.counts[what] += 1
            except TimeoutError:
                self.outcome.wrong[f"{what} was stuck"] += 1
            except ApiError as refusal:
                self.outcome.counts["told to come back"] += 1
                self.outcome.require(bool(BUSY.fullmatch(str(refusal))), f"{what} was refused: {refusal}")
                await asyncio.sleep(PAUSE_S * (1 + self.dice.random()))
            except (OSError, ValueError, EOFError) as error:
                self.outcome.wrong[f"{what}: {error!r}"] += 1

    # ---- its habits

    async def read(self) -> None:
        question, details = self.dice.choice(self.questions), None
        async for details in self.answer(await self.ask("details", question.data)):
            self.outcome.require(question.text.startswith(details["text"]), "an answer was somebody else's")
        whole = bool(details) and details["finish_reason"] == "length"
        self.outcome.require(whole, "an answer was lost")
        same = whole and [token["token_id"] for token in details["tokens"]] == question.token_ids
        self.outcome.require(same, "an answer differed from that of the idle engine")

    async def leave(self) -> None:
        question, seen = self.dice.choice(self.questions), 0
        async with contextlib.aclosing(self.answer(await self.ask("generate", question.data))) as texts:
            async for text in texts:
                self.outcome.require(question.text.startswith(text), "an answer was somebody else's")
                if (seen := seen + 1) > self.dice.randrange(6):
                    return

    async def cancel(self) -> None:
        question = self.dice.choice(self.questions)
        event_id = await self.ask("generate", question.data)
        async with contextlib.aclosing(self.answer(event_id)) as texts:
            await anext(texts, None)
            fields = {"session_hash": event_id, "event_id": event_id, "fn_index": self.events["generate"]}
            await self.post("gradio_api/cancel", fields)

    async def never_read(self) -> None:
        await self.ask("generate", self.dice.choice(self.questions).data)

    async def stop_reading(self) -> None:
        event_id = await self.ask("details", self.dice.choice(self.questions).data)
        reader, writer = await self.request("GET", f"gradio_api/call/details/{event_id}")
        await reader.readline()
        await asyncio.sleep(2 * self.dice.random())
        writer.transport.abort()  # a reset, not a goodbye

    async def chat(self) -> None:
        """The page's own way: it sees its place in line."""
        settings = ["", 24, 0.7, 0.95, 50, 1, 1.1, 0, str(self.dice.randrange(99)), "", False, ""]
        event = {
            "data": ["hello", None, None, *settings],
            "fn_index": self.events["send"],
            "session_hash": self.session,
        }
        await self.post("gradio_api/queue/join", event)
        refused, completed = None, False
        async for line in self.lines(f"gradio_api/queue/data?session_hash={self.session}"):
            self.outcome.places_seen += bool(IN_LINE.search(line))
            refused = refused or BUSY.search(line)
            completed = completed or '"process_completed"' in line
            self.outcome.require('"success":false' not in line, f"a chat failed: {line[:200]}")
        self.outcome.require(completed, "a chat was lost")
        if refused:
            raise ApiError(refused[0])

    async def look(self) -> None:
        for path in ("", "kvscope/live", "healthz", "metrics"):
            reader, writer = await self.request("GET", path)
            try:
                status = (await reader.readline()).split()[1:2]
                self.outcome.require(status == [b"200"], f"/{path} answered {status}")
                await reader.read()
            finally:
                writer.close()

    # ---- HTTP/1.0: an answer ends with its connection

    async def ask(self, endpoint: str, data: list[Any]) -> str:
        return (await self.post(f"gradio_api/call/{endpoint}", {"data": data}))["event_id"]

    async def answer(self, event_id: str) -> AsyncIterator[Any]:
        """The values that the call streams; `ApiError` where it ends in one."""
        parse = EventParser()
        async with contextlib.aclosing(self.lines(f"gradio_api/call/generate/{event_id}")) as lines:
            while True:
                async with asyncio.timeout(QUIET_S):
                    while (line := await anext(lines, None)) is not None and (value := parse(line)) is None:
                        pass
                if line is None:
                    return
                yield value

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        reader, writer = await self.request("POST", path, json.dumps(body).encode())
        try:
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise ValueError(f"/{path} answered {answer[:200]!r}")
            return json.loads(answer)
        finally:
            writer.close()

    async def lines(self, path: str) -> AsyncIterator[str]:
        reader, writer = await self.request("GET", path)
        try:
            while line := await reader.readline():
                yield line.decode().rstrip("\r\n")
        finally:
            writer.close()

    async def request(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.app.port, limit=2**24)
        head = (
            f"{method} /{path} HTTP/1.0\r\nHost: 127.0.0.1:{self.app.port}\r\nX-Forwarded-For: {self.address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


# ---- a run


def known_questions(app: RunningApp) -> list[Question]:
    """Greedy and sampled ones, answered while nobody else is here."""
    questions = []
    for number, prompt in enumerate(PROMPTS):
        for temperature in (0.0, 1.0):
            data = generate_data(
                prompt, max_new_tokens=16 + 8 * number, temperature=temperature, seed=number, ignore_eos=True
            )
            answer = list(stream(app, "details", *data))[-1]
            questions.append(Question(data, [token["token_id"] for token in answer["tokens"]], answer["text"]))
    return questions


def events_of(app: RunningApp) -> dict[str, int]:
    """Gradio's numbers of two events: the endpoint `/generate`, and sending a prompt on the page."""
    config = app.get("config").json()
    prompt = next(part["id"] for part in config["components"] if part["props"].get("elem_id") == "prompt")
    named = {event["api_name"]: event["id"] for event in config["dependencies"]}
    send = next(event["id"] for event in config["dependencies"] if [prompt, "submit"] in event["targets"])
    return {"generate": named["generate"], "send": send}


@dataclass(frozen=True)
class Left:
    """What the web server and its worker hold, together; memory of each."""

    threads: int
    descriptors: int
    children: int
    server_mb: float
    worker_mb: float

    @classmethod
    def now(cls, app: RunningApp) -> "Left":
        server = psutil.Process(app.process.pid)
        children = server.children(recursive=True)
        both = [server, *children]
        memory = [process.memory_info().rss / 1e6 for process in both]
        threads, descriptors = sum(p.num_threads() for p in both), sum(p.num_fds() for p in both)
        return cls(threads, descriptors, len(children), memory[0], sum(memory[1:]))


async def crowd(app: RunningApp, clients: int, seconds: float, outcome: Outcome) -> list[Left]:
    """Run them all; what the server held meanwhile."""
    questions, events = await asyncio.to_thread(known_questions, app), await asyncio.to_thread(events_of, app)
    until = time.monotonic() + seconds
    everybody = asyncio.gather(*(Client(n, app, questions, events, outcome).live(until) for n in range(clients)))
    samples = []
    while not everybody.done():
        await asyncio.wait([everybody], timeout=SAMPLE_S)
        samples.append(Left.now(app))
    await everybody
    return samples


def run(app: RunningApp, clients: int, seconds: float) -> Outcome:
    """A crowd, and what it left behind."""
    outcome = Outcome()
    asyncio.run(crowd(app, min(clients, 20), 3.0, outcome))  # what is made once is made now
    app.wait_idle(LONGEST_S)
    before = Left.now(app)
    samples = asyncio.run(crowd(app, clients, seconds, outcome))
    stats = app.wait_idle(LONGEST_S)
    after = settled(app, before)
    for what in ("threads", "descriptors", "children"):
        counts = getattr(before, what), getattr(after, what)
        outcome.require(counts[1] <= counts[0] + SPARE, f"{what}: {counts[0]}, then {counts[1]}")
    for whose in ("server_mb", "worker_mb"):
        seen = [round(getattr(left, whose)) for left in (*samples, after)]
        first = seen[len(samples) // 3]
        outcome.require(seen[-1] - first < GROWTH_MB, f"memory: {whose} {first}, then {seen[-1]}")
        print(f"{whose}:", *seen[:: max(len(samples) // 10, 1)], "·", seen[-1], "afterwards")
    outcome.require(stats["totals"]["restarts"] == 0, "the worker died")
    outcome.require("Traceback" not in app.log, "a traceback in the log")
    return outcome


def settled(app: RunningApp, before: Left) -> Left:
    """What is left once the server has had time to give up what it kept for the next ones."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        app.get("")  # threads are given up when others are needed
        after = Left.now(app)
        few = after.threads <= before.threads + SPARE and after.descriptors <= before.descriptors + SPARE
        if few or time.monotonic() > deadline:
            return after
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model instead of the default one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_talkative_model(Path(folder)) if options.tiny else None
        with running_app(model, KVSCOPE_THREADS=0, KVSCOPE_MAX_PER_ADDRESS=8) as app:
            outcome = run(app, options.clients, options.seconds)
    print("done:", dict(outcome.counts), "· places in line seen:", outcome.places_seen)
    for sentence, times in outcome.wrong.most_common():
        print(f"WRONG, {times} times: {sentence}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
