"""Mixed load on a server for minutes, and what must hold all the while: nothing leaks, and every answer is right.

    python benchmarks/soak.py --minutes 5 --memory 16MiB
    python benchmarks/soak.py --server-flags "--host-memory 64MiB --tensor-parallel-size 2"

Clients complete, stream, chat over several turns, ask for two outputs, for JSON, for calls of tools, through OpenAI's
newer API and Anthropic's, go away in the middle of a stream, and send requests that have to be refused. The memory is
so small that requests are preempted and snapshots evicted. Every ``--check-every-s`` seconds the load pauses, and once
the server has rested it must hold no block, no slot and no file more than before the first request, and little more
memory than at the first pause. At the end all completed greedy answers are compared with those of an engine of its
own without a cache.

Exits with 1 if anything was not as it must be.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from strandline import LLM, SamplingParams
from strandline.engine.processes.core_loop import TRIM_AFTER_S
from strandline.version import VERSION

LISTENING = re.compile(r"serving \S+ on (http://\S+)")
MAX_OUTPUT_TOKENS = 160
MAX_FAULTS = 10
BAD_BODIES: tuple[tuple[str, object, int], ...] = (
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": []}, 400),
    ("/v1/completions", {"prompt": [10**9]}, 400),
    ("/v1/completions", {"prompt": [5] * 100_000}, 400),
    ("/v1/completions", {"prompt": "x", "model": "nothing"}, 404),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}, 400),
    ("/v1/nothing", {}, 404),
    ("/v1/completions", "no JSON at all", 400),
    ("/v1/completions", {"prompt": "x", "guided_regex": "(["}, 400),
    ("/v1/completions", {"prompt": "x", "guided_grammar": "start: A\nA: /(.*a.{30})/ & ~/(.*b.{30})/"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400),
    ("/v1/responses", {"input": [{"type": "nothing"}]}, 400),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, 400),
    ("/cache/explain", {}, 400),
)
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    '{%- for c in m.tool_calls or [] %}{{- \'<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The demo model's, and tools."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "minimum": -99, "maximum": 99} for name in ("left", "right")},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
    },
}
QUESTIONS = tuple(f"What is {left} + {right}?" for left in (2, 7, 12, 30) for right in (3, 8, 30, 41))
NAMES = ("Ada", "Max", "Lea", "Tom", "Mia", "Ben")


@dataclass
class Server:
    """``strandline serve`` in processes of its own."""

    process: subprocess.Popen[str]
    url: str
    pids: tuple[int, ...]
    """The HTTP process, the engine and, if there are several, the ranks."""
    log: Path

    def open_files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)

    def resident_mib(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass
class Soak:
    """Events and faults of a run."""

    http: httpx.AsyncClient
    prompts: list[list[int]]
    counts: Counter[str] = field(default_factory=Counter)
    answers: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """Texts by (prompt's index, most tokens): there has to be one of each."""
    replies: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """Likewise by (question, most tokens), whichever API was asked."""
    faults: list[str] = field(default_factory=list)
    may_run: asyncio.Event = field(default_factory=asyncio.Event)

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT: {text}", flush=True)
        if len(self.faults) == MAX_FAULTS:
            print(f"{MAX_FAULTS} faults: stopped", flush=True)

    # What clients do

    async def complete(self, rng: Random) -> None:
        """Ask for a greedy completion, streamed or not."""
        index, max_tokens = rng.randrange(len(self.prompts)), rng.choice((1, 8, 40, MAX_OUTPUT_TOKENS))
        body = {"prompt": self.prompts[index], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        if rng.random() < 0.5:
            response = await self.http.post("/v1/completions", json=body)
            response.raise_for_status()
            text = response.json()["choices"][0]["text"]
        else:
            text = await self._stream(body)
        self.answers.setdefault((index, max_tokens), set()).add(text)

    async def _stream(self, body: dict[str, object], max_events: int | None = None) -> str:
        """Return the text of a stream; go away after ``max_events``."""
        text, num_events = "", 0
        async with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    self.fault(f"a stream ended with {piece['error']}")
                    return text
                text += str(piece["choices"][0]["text"])
                num_events += 1
                if num_events == max_events:
                    return text
        return text

    async def abort(self, rng: Random) -> None:
        """Go away in the middle of a stream of several outputs."""
        prompt = rng.choice(self.prompts)
        body = {"prompt": prompt, "max_tokens": 200, "n": 2, "temperature": 1.0, "ignore_eos": True}
        await self._stream(body, rng.randint(1, 6))

    async def give_up(self, rng: Random) -> None:
        """Go away before the first token."""
        body = {"prompt": rng.choice(self.prompts), "max_tokens": 200, "ignore_eos": True}
        try:
            await self.http.post("/v1/completions", json=body, timeout=0.01 + 0.05 * rng.random())
        except httpx.TimeoutException:
            return

    async def refuse(self, rng: Random) -> None:
        """Ask for what has to be refused."""
        path, body, status = rng.choice(BAD_BODIES)
        content = body if isinstance(body, str) else json.dumps(body)
        response = await self.http.post(path, content=content, headers={"Content-Type": "application/json"})
        if response.status_code != status or "error" not in response.json():
            self.fault(f"{path} with {content[:80]} gave {response.status_code}, not {status}: {response.text[:200]}")

    async def chat(self, rng: Random) -> None:
        """Have a conversation; the model has to remember the name that it was told."""
        name = rng.choice(NAMES)
        messages = [{"role": "user", "content": f"Hello! My name is {name}."}]
        for text in ("What is 12 + 30?", "What is my name?"):
            messages += [{"role": "assistant", "content": await self._say(messages)}, {"role": "user", "content": text}]
        answer = await self._say(messages)
        if name not in answer:
            self.fault(f"{name} was called {answer!r}")

    async def _say(self, messages: list[dict[str, str]]) -> str:
        response = await self.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
        response.raise_for_status()
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    async def sample(self, rng: Random) -> None:
        """Ask for several prompts and several sampled outputs at once, of a salt of their own."""
        prompts = rng.sample(self.prompts, 2)
        body = {"prompt": prompts, "n": 2, "max_tokens": 12, "temperature": 1.0, "cache_salt": f"{rng.randrange(3)}"}
        response = await self.http.post("/v1/completions", json={**body, "ignore_eos": True})
        response.raise_for_status()
        if response.json()["usage"]["completion_tokens"] != 48:
            self.fault(f"4 outputs of 12 tokens have {response.json()['usage']}")

    async def structure(self, rng: Random) -> None:
        """Ask for JSON and for an expression, seldom the same twice."""
        schema = TOOL["function"]["parameters"]  # type: ignore[index]
        message = {"role": "user", "content": rng.choice(QUESTIONS)}
        wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
        body = {"messages": [message], "max_tokens": 100, "temperature": 1.0, "response_format": wanted}
        [choice] = (await self._post("/v1/chat/completions", body))["choices"]
        if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"left", "right"}:
            self.fault(f"{choice['message']['content']!r} is not what the schema says")
        pattern = f"[a-f]{{{rng.randint(1, 120)}}}-[0-9]{{2}}"
        body = {"prompt": rng.choice(self.prompts), "max_tokens": 200, "temperature": 1.0, "guided_regex": pattern}
        text = await self._stream(body)
        if re.fullmatch(pattern, text) is None:
            self.fault(f"{text!r} does not match {pattern}")

    async def call(self, rng: Random) -> None:
        """Have a tool called, and send its result."""
        messages: list[dict[str, object]] = [{"role": "user", "content": rng.choice(QUESTIONS)}]
        body = {"messages": messages, "tools": [TOOL], "max_tokens": 200, "temperature": 1.0}
        answer = await self._post("/v1/chat/completions", {**body, "tool_choice": "required"})
        [choice] = answer["choices"]
        calls = choice["message"].get("tool_calls") or []
        if choice["finish_reason"] == "length":
            return
        if not calls or any(set(json.loads(call["function"]["arguments"])) != {"left", "right"} for call in calls):
            self.fault(f"{choice} has no calls as they must be")
            return
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in calls]
        await self._post("/v1/chat/completions", {**body, "messages": [*messages, choice["message"], *results]})

    async def respond(self, rng: Random) -> None:
        """Ask through OpenAI's newer API."""
        question, max_tokens = rng.choice(QUESTIONS), rng.choice((1, 4, 24))
        body = {"input": question, "max_output_tokens": max_tokens, "temperature": 0}
        if rng.random() < 0.5:
            answer = await self._post("/v1/responses", body)
        else:
            answer = (await self._events("/v1/responses", body))[-1]["response"]
        text = "".join(part["text"] for item in answer["output"] for part in item["content"])
        self.replies.setdefault((question, max_tokens), set()).add(text)

    async def message(self, rng: Random) -> None:
        """Ask through Anthropic's API, with a mark."""
        question, max_tokens = rng.choice(QUESTIONS), rng.choice((1, 4, 24))
        part = {"type": "text", "text": question, "cache_control": {"type": "ephemeral"}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": max_tokens, "temperature": 0}
        if rng.random() < 0.5:
            answer = await self._post("/v1/messages", body)
            text = "".join(block["text"] for block in answer["content"])
        else:
            events = await self._events("/v1/messages", body)
            text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
            if events[-1]["type"] != "message_stop":
                self.fault(f"a stream of messages ended with {events[-1]}")
        self.replies.setdefault((question, max_tokens), set()).add(text)

    async def _post(self, path: str, body: dict[str, object]) -> Any:
        response = await self.http.post(path, json=body)
        response.raise_for_status()
        return response.json()

    async def _events(self, path: str, body: dict[str, object]) -> list[Any]:
        response = await self.http.post(path, json={**body, "stream": True})
        response.raise_for_status()
        return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]

    async def look(self, rng: Random) -> None:
        """Read what operators read."""
        for path in ("/metrics", "/health", "/v1/models", "/cache/state"):
            (await self.http.get(path)).raise_for_status()
        account = (await self._post("/cache/explain", {"prompt": rng.choice(self.prompts)}))["account"]
        if account["queried"] != account["hit"] + sum(miss["tokens"] for miss in account["misses"]):
            self.fault(f"an account does not add up: {account}")

    async def client(self, seed: int, deadline_s: float, pause_s: float) -> None:
        """Do one thing after another."""
        rng = Random(seed)
        acts: list[Callable[[Random], Awaitable[None]]] = [self.complete] * 5
        acts += [self.abort, self.abort, self.give_up, self.refuse, self.chat, self.sample, self.look]
        acts += [self.structure, self.call, self.respond, self.message]
        while time.monotonic() < deadline_s and len(self.faults) < MAX_FAULTS:
            await self.may_run.wait()
            act = rng.choice(acts)
            name = act.__name__
            try:
                await act(rng)
                self.counts[name] += 1
            except httpx.HTTPStatusError as error:
                self.fault(f"{name}: {error.response.status_code} {error.response.text[:200]}")
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.fault(f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(pause_s * rng.random())


async def idle_state(http: httpx.AsyncClient, server: Server) -> dict[str, float]:
    """Wait until nothing runs; return what is held then."""
    for _ in range(600):
        text = (await http.get("/metrics")).text
        found = {
            key: float(value) for key, value in re.findall(r"^strandline:(\w+\{[^}]*\}) (\S+)$", text, re.MULTILINE)
        }
        total = {name: sum(v for k, v in found.items() if k.startswith(name + "{")) for name in METRICS}
        if total["num_requests_running"] == total["num_requests_waiting"] == 0:
            held = {k: v for k, v in found.items() if k.startswith("cache_memory_bytes") and "_in_use" in k}
            return {"in_use_bytes": sum(held.values()), "open_files": server.open_files(), **total}
        await asyncio.sleep(0.1)
    raise RuntimeError("the server does not come to rest within a minute")


METRICS = (
    *("num_requests_running", "num_requests_waiting", "num_preemptions_total", "snapshots_evicted_total"),
    *("blocks_evicted_total", "snapshots_resident", "prefix_cache_hits_total", "prefix_cache_queries_total"),
)


async def run(options: argparse.Namespace, server: Server, prompts: list[list[int]]) -> Soak:
    """Put the load on, pausing to look."""
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as http,
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as watcher,
    ):
        soak = Soak(http, prompts)
        before = await idle_state(watcher, server)
        begin_s = time.monotonic()
        deadline_s = begin_s + options.minutes * 60
        soak.may_run.set()
        clients = [
            asyncio.create_task(soak.client(options.seed + index, deadline_s, options.pause_s))
            for index in range(options.clients)
        ]
        first_mib = None
        while any(not client.done() for client in clients):
            next_look_s = min(time.monotonic() + options.check_every_s, deadline_s)
            await asyncio.wait(clients, timeout=max(next_look_s - time.monotonic(), 0.1))
            if len(soak.faults) >= MAX_FAULTS:
                break
            soak.may_run.clear()
            state = await quiet(watcher, server)
            await asyncio.sleep(TRIM_AFTER_S + 1)
            now_mib = server.resident_mib()
            first_mib = first_mib or now_mib
            report(soak, before, state, now_mib, first_mib, options.max_growth_mib, time.monotonic() - begin_s)
            soak.may_run.set()
        await asyncio.gather(*clients)
    return soak


async def quiet(watcher: httpx.AsyncClient, server: Server) -> dict[str, float]:
    """Wait until all clients have come to their pause and the server is idle."""
    state = await idle_state(watcher, server)
    for _ in range(100):
        # A client between two requests of one conversation may start another: look until two looks agree.
        await asyncio.sleep(0.3)
        again = await idle_state(watcher, server)
        if again["prefix_cache_queries_total"] == state["prefix_cache_queries_total"]:
            return again
        state = again
    raise RuntimeError("clients do not come to their pause")


def report(
    soak: Soak,
    before: dict[str, float],
    state: dict[str, float],
    now_mib: float,
    first_mib: float,
    max_growth_mib: float,
    elapsed_s: float,
) -> None:
    """Print how things stand, and note what is not as it must be."""
    print(
        f"{elapsed_s:6.0f} s  {sum(soak.counts.values()):6,} done  {state['in_use_bytes']:,.0f} bytes in use  "
        f"{state['open_files']:.0f} files  {now_mib:,.0f} MiB resident  {state['snapshots_resident']:.0f} snapshots  "
        f"{state['num_preemptions_total']:,.0f} preemptions  {state['snapshots_evicted_total']:,.0f} snapshots and "
        f"{state['blocks_evicted_total']:,.0f} blocks evicted",
        flush=True,
    )
    if state["in_use_bytes"] != before["in_use_bytes"]:
        soak.fault(
            f"idle, but {state['in_use_bytes']:,.0f} bytes are in use; {before['in_use_bytes']:,.0f} at the start"
        )
    # Each of our kept connections is a file of the server's.
    most = before["open_files"] + MAX_KEPT_CONNECTIONS
    if state["open_files"] > most:
        soak.fault(f"{state['open_files']:.0f} files are open, {before['open_files']:.0f} at the start")
    if now_mib - first_mib > max_growth_mib:
        soak.fault(f"resident memory grew from {first_mib:,.0f} to {now_mib:,.0f} MiB")


MAX_KEPT_CONNECTIONS = 20
"""httpx's own limit."""


def check_answers(soak: Soak, model: str) -> int:
    """Compare all greedy answers with those of an engine without a cache; return how many there were."""
    llm = LLM(model, dtype="float32", device="cpu", enable_prefix_caching=False, memory="64MiB")
    for (index, max_tokens), texts in sorted(soak.answers.items()):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        [output] = llm.generate([soak.prompts[index]], params, use_tqdm=False)
        if texts != {output.outputs[0].text}:
            soak.fault(f"prompt {index}, {max_tokens} tokens: {texts} are not {output.outputs[0].text!r}")
    for (question, max_tokens), texts in sorted(soak.replies.items()):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        [output] = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False, chat_template=TEMPLATE)
        if texts != {output.outputs[0].text}:
            soak.fault(f"{question!r}, {max_tokens} tokens: {texts} are not {output.outputs[0].text!r}")
    return len(soak.answers) + len(soak.replies)


def make_prompts(rng: Random, count: int) -> list[list[int]]:
    """Return prompts of odd lengths: a third are long and share a beginning, the others are short.

    Short ones make for preemptions: many are admitted at once, and then all of them grow.
    """
    stem = rng.choices(range(1, 3000), k=700)
    prompts = []
    for index in range(count):
        head = stem[: rng.randint(100, 700)] if index % 3 == 0 else []
        prompts.append(head + rng.choices(range(1, 3000), k=rng.randint(5, 90)))
    return prompts


def start(options: argparse.Namespace, log: Path) -> Server:
    """Start the server and wait until it listens."""
    command = [sys.executable, "-m", "strandline", "serve", options.model, "--port", "0", "--device", "cpu"]
    command += ["--chat-template", TEMPLATE, "--tool-call-parser", "hermes"]
    command += ["--dtype", "float32", "--memory", options.memory, "--max-model-len", "2048", "--max-num-seqs", "16"]
    command += shlex.split(options.server_flags)
    environment = {**os.environ, "STRANDLINE_DEBUG_CACHE": "1" if options.debug_cache else "0"}
    process = subprocess.Popen(command, stderr=log.open("w"), text=True, env=environment)
    while (found := LISTENING.search(log.read_text())) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.1)
    return Server(process, found[1], tuple(descendants(process.pid)), log)


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started, directly or not."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from descendants(int(child))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--memory", default="16MiB")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.0, help="most seconds between a client's requests")
    parser.add_argument("--num-prompts", type=int, default=60, help="different ones")
    parser.add_argument("--check-every-s", type=float, default=30.0)
    parser.add_argument("--max-growth-mib", type=float, default=64.0, help="of resident memory after the first pause")
    parser.add_argument(
        "--debug-cache", action="store_true", help="check the cache's invariants after every step (slow)"
    )
    parser.add_argument("--server-flags", default="", help="further flags of the server, as in a shell")
    parser.add_argument("--log", default="soak-server.log", help="what the server says")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> int:
    options = parse()
    print(f"strandline {VERSION} · {options.clients} clients · {options.minutes:g} minutes · {options.memory} · "
          f"model {options.model} · seed {options.seed} · {options.server_flags}", flush=True)  # fmt: skip
    server = start(options, Path(options.log))
    try:
        soak = asyncio.run(run(options, server, make_prompts(Random(options.seed), options.num_prompts)))
        if server.process.poll() is not None:
            soak.fault(f"the server ended with code {server.process.returncode}")
    finally:
        server.process.terminate()
        server.process.wait(60)
    num_answers = check_answers(soak, options.model)
    print(f"done: {dict(sorted(soak.counts.items()))}; {num_answers} different greedy answers compared")
    print("nothing leaked, every answer was right" if not soak.faults else f"{len(soak.faults)} faults")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
