"""Faults from the project's history, put back one at a time, to see which of them the simulation finds.

`python -m tests.simulation --faults [NAME...]` prints a table: the fault, and after how much CPU time it was found.
"""

# ruff: noqa: E501 # texts of the server

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "charonia"


class Fault(NamedTuple):
    """A fault: text of a file of the server, or the platform, and what it was, or would be, without the fix."""

    name: str
    file: str
    now: str
    before: str

    @property
    def path(self) -> str:
        return self.file if self.file.startswith("platform/") else f"server/{self.file}"

    def text(self) -> str:
        """Return the file with the fault."""
        text = (SOURCES / self.path).read_text()
        if text.count(self.now) != 1:
            raise ValueError(f"'{self.name}': its text is {text.count(self.now)} times in {self.file}")
        return text.replace(self.now, self.before)


# fmt: off
FAULTS = (
    Fault("a cancelled request still starts", "execution/runner.py",
          "            self._handle(Cancel(entry.id), now_ns())\n        if entry.state != DONE:\n            error",
          "            pass\n        if entry.state != DONE:\n            error"),
    Fault("requests at shutdown start after they were answered", "execution/runner.py",
          "            if entry.state == QUEUED:  # or it would start when a slot is idle again\n"
          "                self._handle(Cancel(entry.id), now_ns())\n", ""),
    Fault("an answered request is answered again by its batch", "execution/in_flight.py",
          "        entry = self.entries[index]\n        if entry.state == DONE:\n            return\n        in_flight",
          "        entry = self.entries[index]\n        in_flight"),
    Fault("a request without a response stays open", "execution/in_flight.py",
          "                in_flight.fail(entry, error or _no_response(), FailureReason.BACKEND)\n        self._marks",
          "                pass\n        self._marks"),
    Fault("the end of a batch does not wake a drain", "execution/runner.py",
          "        self._follow(self._slots.end(slot, compute_ns))\n        if self._in_flight.idle is not None:\n"
          "            self._in_flight.idle.set()", "        self._follow(self._slots.end(slot, compute_ns))"),
    Fault("an early timer spins or sleeps on", "execution/runner.py",
          "        now = max(now_ns(), self._armed or 0)\n", "        now = now_ns()\n"),
    Fault("held-back responses lose their order", "execution/in_flight.py",
          "            if not held or not held[-1][1]:\n                held.clear()\n                return\n", ""),
    Fault("a refused request blocks those behind it", "execution/in_flight.py",
          "        if self.order is not None and self.order.holds(entry.id):\n            self.order.pass_on(entry.id, outcome, "
          "True, self._deliver)\n        else:\n            self._deliver(entry, outcome, True)",
          "        if self.order is not None and self.order.holds(entry.id) and not isinstance(outcome, ServingError):\n"
          "            self.order.pass_on(entry.id, outcome, True, self._deliver)\n        else:\n"
          "            self._deliver(entry, outcome, True)"),
    Fault("a slot is offered in place inside of the last batch", "execution/runner.py",
          "        self._is_turn_due = bool(self._free)\n", "        self._is_turn_due = False\n"),
    Fault("a batch keeps requests that timed out", "scheduling/dynamic.py",
          "        self._discard_batch()\n        if self._loop is not None:\n            self._loop.left_queue(count)",
          "        if self._loop is not None:\n            self._loop.left_queue(count)"),
    Fault("a batch grows past its size", "scheduling/dynamic.py",
          "elif self.size + entry.batch_size > policy.size_max:", "elif self.size > policy.size_max:"),
    Fault("the due time of a timed-out batch stays", "scheduling/dynamic.py",
          "                self._due_ns = None  # of a batch whose requests have just timed out\n", ""),
    Fault("the batch is not gathered again for an urgent request", "scheduling/dynamic.py",
          "        if self._batch is not None and is_last:", "        if self._batch is not None:"),
    Fault("queue timeouts do not wake the scheduler", "scheduling/dynamic.py",
          "        if self._due_ns is None or (deadline_ns is not None and deadline_ns < self._due_ns):\n"
          "            return deadline_ns\n", ""),
    Fault("a full queue takes one request more", "scheduling/queue.py",
          "if not size_max or sum(rank.count for rank in ranks) <= size_max:",
          "if not size_max or sum(rank.count for rank in ranks) <= 1000 * size_max:"),
    Fault("a lane stays when its last request goes", "scheduling/queue.py",
          "        if not lane.requests:\n            rank.close(lane)\n            if not rank.count:",
          "        if not lane.requests:\n            if not rank.count:"),
    Fault("a refused sequence request keeps the slot of an ended one", "sequences/scheduler.py",
          "            self._send_due(now_ns, commands)  # a sequence that has just ended may have left its slot to another\n",
          ""),
    Fault("a cancelled sequence stays in the backlog", "sequences/slots.py",
          "        self.backlog.pop(sequence, None)\n        sequence.expires_ns = 0\n        if self._by_key",
          "        sequence.expires_ns = 0\n        if self._by_key"),
    Fault("the next sequence does not get a slot that is left", "sequences/slots.py",
          "        if self.backlog:\n            self._bind(self", "        if False:\n            self._bind(self"),
    Fault("a sequence that ends keeps its state", "sequences/slots.py",
          "        if self._by_key.get(sequence.key) is sequence:\n            del self._by_key[sequence.key]\n", ""),
    Fault("idle sequences never end", "sequences/slots.py",
          "                if first.since_ns + self._policy.idle_ns > now_ns:\n                    return",
          "                if True:\n                    return"),
    Fault("a reload breaks off live sequences", "sequences/runner.py",
          "                if runner.holds(request.correlation_id) and not self._sequencer.holds(request.correlation_id):\n"
          "                    return runner.submit(request, reply)\n", "                pass\n"),
    Fault("two requests of a sequence run at the same time", "sequences/scheduler.py",
          "        elif sequence.running is None and len(sequence.queue) == 1:", "        elif len(sequence.queue) == 1:"),
    Fault("a cached response outlives a reload", "response_cache/memory.py",
          "return secrets.token_bytes(NAMESPACE_BYTES)", "return f\"{model} {version}\".encode()"),
    Fault("a failed computation leaves its followers waiting", "response_cache/runner.py",
          "            self._finish(call, outcome)\n            self._lead(flight)\n            return",
          "            self._finish(call, outcome)\n            return"),
    Fault("a flight never ends, so its response is never looked up again", "response_cache/runner.py",
          "        self._flights.end(flight)\n        now = now_ns()\n        self.metrics.cache_miss",
          "        now = now_ns()\n        self.metrics.cache_miss"),
    Fault("a follower of a flight does not time out", "response_cache/runner.py",
          "            if timeout_ns:\n                call.timer", "            if False:\n                call.timer"),
    Fault("a client that leaves does not cancel its request", "http/connection.py",
          "        for exchange in abandoned:\n            exchange.abandon()\n", "        for exchange in abandoned:\n"),
    Fault("a connection stays when its client has gone", "http/connection.py",
          "        self._host.closed(self)\n        self._abandon_exchanges()", "        self._abandon_exchanges()"),
    Fault("reading stays paused", "http/connection.py",
          "            self._since_s = self._shared.now_s\n            transport.resume_reading()",
          "            self._since_s = self._shared.now_s"),
    Fault("a call without an answer outlives its deadline", "grpc/calls.py",
          "            self._timer = service.loop.call_later(head.timeout_ns / 1e9, self._expire)", "            pass"),
    Fault("a call that ends does not cancel its request", "grpc/calls.py",
          "        if self._ticket is not None:\n            self._ticket.cancel()",
          "        if self._ticket is not None:\n            pass"),
    Fault("a stream that ends does not cancel its requests", "grpc/streams.py",
          "            if pending.ticket is not None:\n                pending.ticket.cancel()", "            pass"),
    Fault("a stream does not end after its last answer", "grpc/streams.py",
          "        if final:\n            self._call.resume()", "        if final and self._open_requests:\n            self._call.resume()"),
    Fault("outcomes of a stream overtake each other", "grpc/streams.py",
          "        if pending.is_ordered and self._in_order[0] is not pending:", "        if False:"),
    Fault("a refused front end keeps the connection to the engine", "front_ends/remote_engine.py",
          "            self._link.close()  # its end must not count as the end of the next engine\n", ""),
    Fault("requests in flight wait for an engine that has gone", "front_ends/remote_engine.py",
          "        self._fail_all(interrupted())\n", ""),
    Fault("requests in flight are sent again to the next engine", "front_ends/remote_engine.py",
          "        if self.held.is_disconnected:\n            self.held.hold(number, request, reply)\n        else:\n"
          "            self._send(number, request, reply)",
          "        self.held._held[number] = (request, reply)\n        self.held._reconnect._held[number] = 0\n"
          "        if not self.held.is_disconnected:\n            self._send(number, request, reply)"),
    Fault("sequences go on at an engine that does not know them", "front_ends/remote_engine.py",
          "        self.sequences.engine_ended()\n        self._fail_all", "        self._fail_all"),
    Fault("held requests are forgotten when the engine is back", "front_ends/reconnect.py",
          "                return [Send(each) for each in self._release()]", "                self._release()\n                return []"),
    Fault("held requests are kept for ever", "front_ends/reconnect.py",
          "        return self._disconnected_ns + HOLD_NS_MAX if self._disconnected_ns is not None and self._held else None",
          "        return None"),
    Fault("a lost front end leaves its requests running", "front_ends/engine_port.py",
          "        self._open.clear()\n        for ticket in tickets:\n            ticket.cancel()",
          "        for ticket in ():\n            ticket.cancel()"),
    Fault("an answer comes before the front ends know the change", "front_ends/engine_port.py",
          "                await self._publish()", "                self._changed()"),
    Fault("a question to an engine that has gone is never answered", "front_ends/link.py",
          "        for answer in self._asked.values():\n            if not answer.done():\n"
          "                answer.set_exception(self._gone())\n", ""),
    Fault("unloads by request are forgotten with the engine", "front_ends/engine_changes.py",
          "            self._changes.model_unloaded(name, with_dependents=with_dependents)", "            pass"),
    Fault("a reload takes the model away while it loads", "lifecycle/model_table.py",
          "        self._retiring.add(loaded.runner)", "        from charonia.core.errors import unavailable; loaded.runner.abandon(unavailable('retired'))"),
    Fault("a batch forgets the oldest request that a full queue drops", "scheduling/dynamic.py",
          "                self._send_due(now_ns, commands)  # without the oldest", "                #"),
    Fault("a version that is being loaded is refused", "lifecycle/on_demand.py",
          "if key is None or (key not in self._loads and (request.model_name, \"\") in self._lifecycle.table.routes):",
          "if key is None or (request.model_name, \"\") in self._lifecycle.table.routes:"),
    Fault("an upgrade waits for an engine that has crashed", "guard/restarts.py",
          "        if upgrade.stops_first or not former.is_alive:", "        if upgrade.stops_first:"),
    Fault("registered memory is forgotten with the engine", "front_ends/engine_changes.py",
          "            services.regions.remember([*now.system, *now.cuda])", "            pass"),
    Fault("a load ends half-way when its front end goes", "lifecycle/lifecycle.py",
          "await asyncio.shield(self._load_all(keys, found, override, are_expected=False)):",
          "await self._load_all(keys, found, override, are_expected=False):"),
    Fault("a model is idle while sequences go on in the version before", "sequences/runner.py",
          "sum(runner._sequencer.live for runner in self.lineage())", "self._sequencer.live"),
    Fault("a server without a record is left alone", "platform/deployments/reconciler.py",
          "                        (target.remove if is_gone else target.stop)(key)\n", ""),
)
LEFTOVERS = (
    (Fault("the timers of a connection stay", "grpc/connection.py",
          "            handle.cancel()\n        self._handles.clear()", "            pass\n        self._handles.clear()"), "--seed 1", "timer "),
    (Fault("the bytes of a copy stay counted", "traffic/split.py",
          "        self._owner.size_bytes -= self._size\n", ""), "--seed 9 --theme canaries", "Shadowing has size_bytes"),
    (Fault("a request's files stay", "lifecycle/provision.py",
          "            await asyncio.to_thread(self.override.remove)\n", "            pass\n"), "--seed 1", "charonia-files-"),
    (Fault("a closed connection is kept", "http/connection.py", "        self._transport = None\n",
          "        self._transport = None\n        globals().setdefault('kept', []).append(self)\n"), "--seed 1", "HttpConnection"),
    (Fault("shared memory of a response stays in use", "channel/end.py", "        self._released.append(region)\n",
          "        pass\n"), "--seed 5 --length 2", "references to shared memory"),
    (Fault("memory that a killed worker used stays", "channel/regions.py",
          "        for region in self._used.values():\n            region.close()\n", ""), "--seed 7 --theme timers --length 1", "/memfd:charonia"),
    (Fault("the reports of ended processes stay", "guard/supervisor.py",
          "                self._loop.call_later(REPORT_S, self._remove_files, name)\n", ""), "--seed 6 --theme restarts --length 1", ".report"),
    (Fault("the socket of a new engine that was killed stays", "front_ends/processes.py",
          ", folder / _socket_of(name)):\n", "):\n"), "--seed 34 --theme restarts", "private/engine.sock"),
    (Fault("an engine keeps the front ends that have gone", "front_ends/engine_port.py",
          "        self._peers.discard(peer)\n", ""), "--seed 2 --theme restarts", "end of a link"),
    (Fault("the instances of a load stay at shutdown", "lifecycle/lifecycle.py",
          "            await asyncio.wait(list(self._loads.values()), timeout=LOADS_S_MAX)\n", "            pass\n"), "--seed 19 --theme demand", "after the shutdown, there is still"),
)
"""What each check of leftovers must find, the scenario that shows it, and a part of the problem."""
# fmt: on


def put_back(name: str) -> None:
    """Give the functions of a fault's module their code with the fault; those that are imported elsewhere, too."""
    fault = next(each for each in (*FAULTS, *(left for left, *_ in LEFTOVERS)) if each.name == name)
    module = import_module("charonia." + fault.path.removesuffix(".py").replace("/", "."))
    file = str(module.__file__)
    if not file.endswith(".py"):
        raise ValueError(f"'{name}': {module.__name__} is compiled, and CHARONIA_PURE=1 is not set")
    compiled = _codes(compile(fault.text(), file, "exec"))
    codes = {_key(code): code for code in compiled if code.co_name != "<lambda>"}
    for each in gc.get_objects():  # not `isinstance`, which asks a weak proxy for the class of what it stands for
        if type(each) is FunctionType and each.__code__.co_filename == file and _key(each.__code__) in codes:
            each.__code__ = codes[_key(each.__code__)]


def _key(code: CodeType) -> tuple[str, int]:
    """Return what a function is found by: a property's getter and setter have the same name."""
    return code.co_qualname, code.co_argcount


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def try_fault(fault: Fault, seconds: float, seed: int) -> tuple[bool, float, str]:
    """Run the simulation with a fault; return whether it was found, the CPU time, and the first problem.

    A seed that fails without the fault, too, has not found it.
    """
    command = [sys.executable, "-m", "tests.simulation", "--quick"]
    command += ["--control-plane", "8"] if fault.file.startswith("platform/") else []

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)

    done = run("--seed", str(seed), "--seconds", str(seconds), "--fault", fault.name)
    found = re.search(r"failed: .*?(\d+)\D.* after ([\d.]+) s of CPU", done.stdout)
    if found is None:
        return False, seconds, done.stderr[-300:]
    if run("--seed", found[1], "--scenarios", "1").returncode:
        return False, float(found[2]), f"seed {found[1]} fails without the fault, too"
    problem = re.search(r"^  problem (.*)$", done.stdout, re.MULTILINE)
    return True, float(found[2]), f"seed {found[1]}: {problem[1] if problem else done.stdout[-300:]}"


def table(beginnings: list[str], seconds: float, seed: int) -> int:
    """Run scenarios from a seed on; print after how much CPU time each fault is found; return how many are not."""
    chosen = [f for f in FAULTS if not beginnings or any(f.name.startswith(each) for each in beginnings)]
    print("| fault | module | found after (s of CPU) | by |\n|---|---|---|---|")
    count = 0
    for fault in chosen:
        was_found, took_s, problem = try_fault(fault, seconds, seed)
        count += was_found
        after = f"{took_s:.1f}" if was_found else f"not in {took_s:.0f}"
        print(f"| {fault.name} | `{fault.file}` | {after} | {problem[:110]} |", flush=True)
    print(f"\n{count} of {len(chosen)} found.")
    return len(chosen) - count
