"""The engine loop: messages in, one step, messages out.

With overlap, step n + 1 is planned and launched before the tokens of step n are read; its inputs that the host does not
know yet are taken on the device. When the device is already done there is nothing to hide, and the tokens are read
first. A request that turns out to have ended in step n has one token too many in step n + 1, which is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from zhilight.engine.batch import Chunk, SlotTable, StepPlan
from zhilight.engine.block_pool import BlockPool
from zhilight.engine.messages import Abort, Add, Embed, EngineStats, Finished, StepOutput
from zhilight.engine.request import Request, RequestState
from zhilight.engine.runner import Runner, StepInFlight, prompt_positions
from zhilight.engine.scheduler import MustWait, Scheduler
from zhilight.errors import DeviceError, ZhiLightError

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 5.0
"""Seconds between two checks of the KV bookkeeping while the engine is idle."""
EMBED_PATIENCE = 64
"""Steps that an embedding waits for free blocks before admissions are held back for it."""


class EngineCore:
    """One engine: call `add`, `abort`, `embed`, and `step` as long as `has_work`. Single-threaded.

    compile_grammar: StructuredOutput -> the state of its grammar; called in a thread of its own.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, *, enable_overlap: bool = True, check_invariants: bool = False,
                 compile_grammar: Callable[[Any], Any] | None = None):
        self.runner = runner
        self.scheduler = scheduler
        self.pool: BlockPool = scheduler.pool
        self.table: SlotTable = scheduler.table
        self.enable_overlap = enable_overlap
        self.check_every_step = check_invariants
        self._requests: dict[int, Request] = {}
        self._flight: StepInFlight | None = None
        self._compile_grammar = compile_grammar
        self._compiler: ThreadPoolExecutor | None = None
        self._compiling: dict[int, tuple[Request, Future]] = {}
        self._embeds: deque[tuple[Embed, int]] = deque()
        self._structured: dict[int, Request] = {}
        self._stats = EngineStats(kv_blocks=self.pool.num_blocks)
        self._last_check = 0.0
        self._out = StepOutput()
        self.on_compiled: Callable[[], None] = lambda: None
        """Called from the compiler's thread when a grammar is ready, so that a sleeping loop can wake up."""

    # ---- requests ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now. Grammars that are still being compiled do not count."""
        return (self._flight is not None or self.scheduler.has_work or bool(self._embeds) or bool(self._out.finished)
                or any(future.done() for _, future in self._compiling.values()))

    def add(self, message: Add) -> None:
        """Queue a sequence that has been validated."""
        request = Request(message.handle, np.frombuffer(message.prompt, np.int32), message.params, message.arrival,
                          message.priority, message.cache_salt, message.bad_words)
        self._requests[request.handle] = request
        if message.params.structured is None:
            self.scheduler.add(request)
        else:
            self._compiler = self._compiler or ThreadPoolExecutor(1, "grammar")
            future = self._compiler.submit(self._compile, message.params.structured)
            self._compiling[request.handle] = (request, future)
            future.add_done_callback(lambda _: self.on_compiled())

    def embed(self, message: Embed) -> None:
        """Queue the embedding of an input that has been validated."""
        self._embeds.append((message, self._stats.steps))

    def abort(self, message: Abort) -> None:
        """Forget sequences; idempotent, and fine for those that have ended or were never there."""
        for handle in message.handles:
            request = self._requests.pop(handle, None)
            if request is None:
                self._embeds = deque(entry for entry in self._embeds if entry[0].handle != handle)
                continue
            compiling = self._compiling.pop(handle, None)
            if compiling is None:
                self.scheduler.remove(request)
            else:
                compiling[1].cancel()
            self._forget(request)
            self._stats.aborts += 1

    # ---- the step ---------------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Do one round: launch the next step and read the one before. Raises DeviceError, after which the device is lost."""
        begin = time.monotonic()
        scheduled = device = 0.0
        self._collect_grammars()
        self.scheduler.hold_admissions = False
        if self._embeds:
            self._run_embeds()
        if self._flight is not None and (not self.enable_overlap or self._flight.ready()):
            device += self._read()
        plan = None
        try:
            mark = time.monotonic()
            plan, waited = self._schedule()
            scheduled = time.monotonic() - mark - waited
            device += waited
            previous = self._flight
            if plan is None:
                if previous is not None:
                    device += self._read()
            else:
                flight = self.runner.begin(plan)
                late = self.runner.sampler.is_late(plan)
                if not late:
                    self.runner.complete(flight)
                if self.runner.ops.name == "cpu":
                    device += time.monotonic() - mark - scheduled - waited
                if previous is not None:
                    device += self._read()
                if late:
                    self.runner.complete(flight)
                    self._end_stuck_grammars()
                self._flight = flight
                self._stats.steps += 1
        except DeviceError:
            raise
        except Exception as error:
            self._fail([plan] if plan is not None else [], error)
        if self.check_every_step:
            self.check()
        out = self._output()
        stats = self._stats
        stats.schedule_seconds += scheduled
        stats.device_seconds += device
        stats.host_seconds += max(0.0, time.monotonic() - begin - scheduled - device)
        return out

    def _schedule(self) -> tuple[StepPlan | None, float]:
        """The next step, and the seconds that it had to wait for the step in flight."""
        try:
            return self.scheduler.schedule(in_flight=self._flight is not None), 0.0
        except MustWait:
            waited = self._read()
            return self.scheduler.schedule(), waited

    def _read(self) -> float:
        """Take in the results of the step in flight; returns the seconds it had to wait for them."""
        flight, self._flight = self._flight, None
        begin = time.monotonic()
        try:
            tokens = flight.read_tokens()
            waited = time.monotonic() - begin
            self._take_in(flight, tokens)
        except DeviceError:
            raise
        except Exception as error:
            self._fail([flight.plan], error)
            return 0.0
        return waited

    def _take_in(self, flight: StepInFlight, tokens: np.ndarray) -> None:
        plan, out, stats = flight.plan, self._out, self._stats
        result = self.scheduler.apply(plan, tokens)
        out.handles += result.handles.tobytes()
        out.tokens += result.tokens.astype(np.int32, copy=False).tobytes()
        stats.generation_tokens += len(result.tokens)
        if flight.logprobs is not None:
            counts = flight.num_logprobs[result.rows]
            wanted = np.flatnonzero(counts >= 0)
            positions = flight.logprobs.positions(list(zip(result.rows[wanted].tolist(), counts[wanted].tolist(), strict=True)))
            out.logprobs.extend(zip(result.handles[wanted].tolist(), positions, strict=True))
        if flight.prompt_logprobs is not None:
            out.prompt_logprobs.extend(prompt_positions(plan.prompt_rows, flight.prompt_logprobs))
        if self._structured:
            self._advance_grammars(result.handles, result.tokens)
        for request, reason, stop in result.finished:
            self._finish(request, Finished(request.handle, reason, stop, stop_token=reason == "stop"))

    def _finish(self, request: Request, finished: Finished) -> None:
        if self._requests.pop(request.handle, None) is None:
            return
        self._out.finished.append(finished)
        self._stats.finished += 1
        self._stats.failed += finished.reason == "error"
        self._forget(request)

    def _forget(self, request: Request) -> None:
        self._structured.pop(request.handle, None)
        self.runner.sampler.forget(request.handle)

    def _fail(self, plans: list[StepPlan], error: Exception) -> None:
        """End the requests of a failed step with the error. What the step before it gave is still good."""
        logger.error("A step failed; its requests end with the error, the engine goes on: %s", error, exc_info=error)
        if self._flight is not None:
            self._read()
        failed = {}
        for plan in plans:
            slots = plan.sample_slots[self.table.epoch[plan.sample_slots] == plan.epochs]
            failed.update((slot, self.table.requests[slot]) for slot in slots.tolist())
            failed.update((request.slot, request) for request in plan.requests if request.state is RequestState.RUNNING)
        message = str(error) if isinstance(error, ZhiLightError) else f"{type(error).__name__}: {error}"
        if not plans:  # planning itself failed: nobody knows for whom, so everyone who runs
            failed = {request.slot: request for request in self.scheduler.running_requests()}
        for request in failed.values():
            if request is not None:
                self.scheduler.remove(request)
                self._finish(request, Finished(request.handle, "error", error=message))
        for request in list(self._requests.values()):  # those that ended in the step, before anyone was told
            if request.state is RequestState.FINISHED:
                self._finish(request, Finished(request.handle, "error", error=message))
        self.pool.reset_cache()  # blocks are known by hash before their KV is computed

    # ---- grammars ---------------------------------------------------------------------------------------------

    def wait_for_grammars(self) -> None:
        """Block until one of the grammars being compiled is ready; returns at once when there are none."""
        wait([future for _, future in self._compiling.values()], return_when=FIRST_COMPLETED)

    def _compile(self, structured: Any) -> Any:
        if self._compile_grammar is None:
            raise ZhiLightError("This engine has no tokenizer, so it cannot follow a grammar.")
        return self._compile_grammar(structured)

    def _collect_grammars(self) -> None:
        for handle in [handle for handle, (_, future) in self._compiling.items() if future.done()]:
            request, future = self._compiling.pop(handle)
            error = future.exception()
            if error is None:
                request.grammar = future.result()
                self._structured[handle] = request
                self.scheduler.add(request)
            elif isinstance(error, ZhiLightError):
                param = getattr(error, "param", None) or "structured"
                self._finish(request, Finished(handle, "refused", error=str(error), param=param))
            else:
                logger.error("The grammar of request %d could not be compiled", handle, exc_info=error)
                self._finish(request, Finished(handle, "error", error=f"{type(error).__name__}: {error}"))

    def _end_stuck_grammars(self) -> None:
        faults, self.runner.sampler.faults = self.runner.sampler.faults, []
        for request, error in faults:
            self.scheduler.remove(request)
            self._finish(request, Finished(request.handle, "error", error=str(error), param=error.param))

    def _advance_grammars(self, handles: np.ndarray, tokens: np.ndarray) -> None:
        for handle, token in zip(handles.tolist(), tokens.tolist(), strict=True):
            request = self._structured.get(handle)
            if request is None or request.state is RequestState.FINISHED:
                continue
            try:
                request.grammar.advance(token)
                ended = request.grammar.is_finished
            except Exception as error:
                logger.exception("The grammar of request %d failed at token %d", handle, token)
                self.scheduler.remove(request)
                self._finish(request, Finished(handle, "error", error=str(error), param=getattr(error, "param", None)))
                continue
            if ended:
                self.scheduler.remove(request)
                self._finish(request, Finished(handle, "stop"))

    # ---- embeddings -------------------------------------------------------------------------------------------

    def _run_embeds(self) -> None:
        """Run the first waiting embedding when its blocks are free. After a while new requests are held back for it."""
        message, since = self._embeds[0]
        prompt = np.frombuffer(message.prompt, np.int32)
        count = -(-len(prompt) // self.pool.block_size)
        if count > self.pool.available or not self.table.free:
            self.scheduler.hold_admissions = self._stats.steps - since >= EMBED_PATIENCE
            return
        self._embeds.popleft()
        try:
            self._out.embeddings.append((message.handle, self._hidden_state(prompt, self.pool.allocate(count)).tobytes()))
        except DeviceError:
            raise
        except Exception as error:
            logger.exception("Embedding %d failed", message.handle)
            self._out.finished.append(Finished(message.handle, "error", error=str(error)))

    def _hidden_state(self, prompt: np.ndarray, blocks: list[int]) -> np.ndarray:
        """[H] float32 of the last token, computed in chunks beside the running requests."""
        from zhilight.config.sampling import SamplingParams

        request = Request(-1, prompt, SamplingParams(max_tokens=1))
        slot = self.table.assign(request, blocks, 0, 0)
        try:
            limit = self.scheduler.max_num_batched_tokens
            nobody = np.empty(0, np.int64)
            for start in range(0, len(prompt), limit):
                end = min(start + limit, len(prompt))
                hidden = self.runner.hidden_states(self.table.build(nobody, [Chunk(slot, start, end, True)]))
            return hidden[-1]
        finally:
            self.pool.release(self.table.release(slot))

    # ---- statistics and invariants ----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The gauges and counters now. The same object each time, brought up to date."""
        stats, scheduler = self._stats, self.scheduler
        stats.running = scheduler.num_running
        stats.waiting = len(scheduler.waiting) + len(self._compiling) + len(self._embeds)
        stats.kv_usage = self.pool.usage
        stats.prompt_tokens = scheduler.prompt_tokens
        stats.prefix_query_tokens = scheduler.prefix_query_tokens
        stats.prefix_hit_tokens = scheduler.prefix_hit_tokens
        stats.preemptions = scheduler.num_preemptions
        return stats

    def check(self) -> list[str]:
        """Compare the KV bookkeeping with the running requests; a fault is logged and mended. Returns the faults."""
        faults = self.pool.check(self.scheduler.block_tables())
        if faults:
            self._stats.kv_faults += 1
            logger.error("The KV blocks' bookkeeping was wrong and has been rebuilt: %s", "; ".join(faults))
            self.pool.rebuild(self.scheduler.block_tables())
        return faults

    def idle(self) -> None:
        """To be called when there is no work, before the loop goes to sleep."""
        now = time.monotonic()
        if now - self._last_check >= CHECK_INTERVAL:
            self._last_check = now
            self.check()

    def _output(self) -> StepOutput:
        out, self._out = self._out, StepOutput()
        out.started, self.scheduler.started = self.scheduler.started, []
        return out

    def close(self) -> None:
        """Stop the compiler's thread, end the step in flight and give the device's memory back."""
        if self._compiler is not None:
            self._compiler.shutdown(wait=False, cancel_futures=True)
        if self._flight is not None:
            self._flight.read_tokens()
            self._flight = None
        self.runner.ops.close()
