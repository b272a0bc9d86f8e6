"""The engine's turn: admit, one pass over all running rows and chunks of prompts, choose, report.

Single-threaded and steppable by hand; it knows token ids and nothing of text, processes or pages.
"""

import time
from collections import deque
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.grammar import GrammarError, Grammars
from engine.kv_cache import KVCache
from engine.lanes import LaneFailed
from engine.pace import Pace
from engine.processors import Row
from engine.public import PublicPrefixes
from engine.race import Race, probe
from engine.runner import Chunk, ModelRunner
from engine.sampler import choose
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.wire import Failure, PromptLogprobs, RaceStep, SlotState, StartRace, StepRecord, StepReport, Token

NOT_FINITE = "The model produced numbers that are not finite for this text, so its answer ends here."
PROBE_EVERY_TOKENS = 16
MOST_CREDIT_MS = 500.0
MOST_SCORED_TOKENS = 128  # whose logits, one vocabulary a token, are held at once


class EngineCore:
    """Decodes many sequences together. `step()` is one turn; call it while `has_work`."""

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, eos_token_ids: frozenset[int], grammars: Grammars | None = None
    ):
        self.runner = runner
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.grammars = grammars
        # A GPU keeps one pool for good, a CPU's grows with the need.
        slots, positions = (2, 128) if runner.device.type == "cpu" else self._largest_shape()
        cache = KVCache(runner.layer_shapes, slots, positions)
        self.scheduler = Scheduler(cache, config.max_batch_size, config.cache_tokens)
        self.public = PublicPrefixes(cache)
        self.race: Race | None = None
        self.waiting_races: deque[StartRace] = deque()
        # Milliseconds of exclusive measuring that the shared batch's own work has paid for.
        self._probe_credit_ms = 0.0
        self._race_credit_ms = 0.0
        self.probe_share = config.probe_share
        self._padding_tokens = 0
        self._pace = Pace(config.prefill_chunk)

    @property
    def cache(self) -> KVCache:
        return self.scheduler.cache

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.live or self.race or self.waiting_races)

    def submit(self, sequence: Sequence) -> None:
        self.scheduler.waiting.append(sequence)

    def start_race(self, race: StartRace) -> None:
        """Queue a race; one runs at a time."""
        self.waiting_races.append(race)

    def cancel(self, request_id: int) -> None:
        """Forget a sequence or a race; its row is free for the next step."""
        if self.race and self.race.request_id == request_id:
            self._end_race()
        self.waiting_races = deque(race for race in self.waiting_races if race.request_id != request_id)
        for sequence in [*self.scheduler.live, *self.scheduler.waiting]:
            if sequence.request_id == request_id:
                self.scheduler.release(sequence, retain=True)

    def park(self) -> None:
        """Put everything aside: who comes back goes on from its keys and values, unless their room was needed."""
        self._end_race()
        self.waiting_races.clear()
        self.scheduler.park()

    @torch.no_grad()
    def step(self) -> StepReport:
        report = StepReport(StepRecord(time=time.time()))
        self._padding_tokens = 0
        busy = bool(self.scheduler.waiting) or len(self.scheduler.live) > self.config.max_batch_size // 2
        self._probe(report, busy)
        self._race(report, busy)
        started = time.perf_counter()
        self.runner.forward_ms = 0.0
        self.scheduler.admit()
        chosen, logits = self._forward(report)
        if chosen:
            self._choose(chosen, torch.cat(logits) if len(logits) > 1 else logits[0], report)
        self._account(report, 1000 * (time.perf_counter() - started))
        return report

    def _forward(self, report: StepReport) -> tuple[list[Sequence], list[torch.Tensor]]:
        """One pass: the pending token of every running sequence, and chunks of prompts.

        Whose next token can be chosen now, and its logits, each `[some, vocabulary]`.
        """
        running, chunks = list(self.scheduler.running), self._next_chunks()
        if not running and not chunks:
            return [], []
        token_ids, positions = [s.last_token_id for s in running], [s.cached_tokens for s in running]
        decoded, read = self.runner.step(self.cache, token_ids, positions, [chunk for _, chunk in chunks])
        chosen, logits = self._take_chunks(chunks, read, report)
        if decoded is not None:
            self._take_rows(running, report.record)
            logits.append(decoded)
        return chosen + running, logits

    def _next_chunks(self) -> list[tuple[Sequence, Chunk]]:
        """Prompt tokens for this step: at least half for who came first, the rest for those who need the fewest."""
        chunks: list[tuple[Sequence, Chunk]] = []
        budget = self._pace.budget(len(self.scheduler.running))
        oldest, others = self.scheduler.prefilling[:1], self.scheduler.prefilling[1:]
        others.sort(key=_unread)
        for sequence in [*oldest, *others]:
            scored = _is_scored(sequence)
            if not scored:
                self.public.lend(sequence)
            # What one sequence computes for everybody now, the others are lent in the next step.
            if budget == 0 or any(self.public.computes_for(other, sequence) for other, _ in chunks):
                continue
            start = sequence.cached_tokens
            most = budget if chunks else max(budget - sum(map(_unread, others)), budget // 2)
            ids = sequence.token_ids[start : start + (min(most, MOST_SCORED_TOKENS) if scored else most)]
            chunks.append((sequence, Chunk(sequence.slot, start, ids, every=scored)))
            budget -= len(ids)
        return chunks

    def _take_chunks(
        self, chunks: list[tuple[Sequence, Chunk]], read: list[torch.Tensor], report: StepReport
    ) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Account for what was read of prompts; the sequences whose prompts are complete, and their logits."""
        completed: list[Sequence] = []
        last: list[torch.Tensor] = []
        for (sequence, chunk), logits in zip(chunks, read, strict=True):
            sequence.cached_tokens += len(chunk.token_ids)
            report.record.prefill_tokens += len(chunk.token_ids)
            self.public.keep(sequence)
            if chunk.every:
                self._score_prompt(sequence, chunk.start, logits, report)
            if sequence.cached_tokens == sequence.length:
                completed.append(sequence)
                last.append(logits[-1:] if chunk.every else logits[None])
        return completed, last

    def _take_rows(self, running: list[Sequence], record: StepRecord) -> None:
        record.batch_size = len(running)
        for sequence in running:
            sequence.cached_tokens += 1
        lengths = [sequence.cached_tokens for sequence in running]
        self._padding_tokens = self.runner.window(self.cache, max(lengths)) * len(lengths) - sum(lengths)

    def _score_prompt(self, sequence: Sequence, start: int, logits: torch.Tensor, report: StepReport) -> None:
        """Log-probabilities of the prompt tokens that `logits` `[tokens, vocabulary]` from `start` on predict."""
        ids = sequence.prompt_ids[start + 1 : start + 1 + len(logits)]
        predicted = torch.tensor(ids, dtype=torch.long, device=logits.device)
        scores = logits[: len(predicted)].log_softmax(dim=-1).gather(1, predicted[:, None])[:, 0]
        sequence.prompt_logprobs = [*(sequence.prompt_logprobs if start else [None]), *scores.tolist()]
        if sequence.cached_tokens == sequence.length:
            report.prompt_logprobs.append(PromptLogprobs(sequence.request_id, sequence.prompt_logprobs))

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor, report: StepReport) -> None:
        """One token for each row; rows that are complete leave, freshly prefilled ones join the batch."""
        allowed, stuck = self._allowed(sequences)
        rows = [
            Row(s.params, s.seed, len(s.output_ids), s.slot, s.length, allowed.get(s.request_id)) for s in sequences
        ]
        choice = choose(logits, rows, self.cache.token_ids)
        columns = (choice.token_ids.tolist(), choice.logprobs.tolist(), choice.top_tokens, choice.finite.tolist())
        for sequence, token_id, logprob, top_tokens, finite in zip(sequences, *columns, strict=True):
            if not finite:
                self._fail(sequence, NOT_FINITE, report)
            elif sequence.request_id in stuck:
                self._fail(sequence, stuck[sequence.request_id], report)
            else:
                self._emit(sequence, Token(sequence.request_id, token_id, logprob, top_tokens=top_tokens), report)

    def _allowed(self, sequences: list[Sequence]) -> tuple[dict[int, bytes], dict[int, str]]:
        """By request: the tokens that its grammar admits next, or why its grammar cannot go on."""
        allowed: dict[int, bytes] = {}
        stuck: dict[int, str] = {}
        for sequence in sequences:
            if sequence.params.grammar is None:
                continue
            try:
                if self.grammars is None:
                    raise GrammarError("This engine was started without grammars.")
                if sequence.matcher is None:
                    sequence.matcher = self.grammars.matcher(sequence.params.grammar)
                # All that is new to it: one token, or after a restart the whole answer so far.
                sequence.matcher.follow(sequence.output_ids)
                allowed[sequence.request_id] = sequence.matcher.allowed()
            except GrammarError as error:
                stuck[sequence.request_id] = str(error)
        return allowed, stuck

    def _emit(self, sequence: Sequence, token: Token, report: StepReport) -> None:
        sequence.output_ids.append(token.token_id)
        reason = None
        if len(sequence.output_ids) == sequence.params.max_new_tokens:
            reason = "length"
        elif token.token_id in self.eos_token_ids and not sequence.params.ignore_eos:
            reason = "eos_token"
        report.tokens.append(replace(token, finish_reason=reason))
        if reason:
            self.scheduler.release(sequence, retain=True)
        elif sequence in self.scheduler.prefilling:
            self.scheduler.start_running(sequence)

    def _fail(self, sequence: Sequence, message: str, report: StepReport) -> None:
        report.failures.append(Failure(sequence.request_id, message))
        self.cache.clear(sequence.slot)
        self.scheduler.release(sequence, retain=False)

    def _probe(self, report: StepReport, busy: bool) -> None:
        """Measure naive against cached decoding of one running sequence, if its turn and the share allow it."""
        if busy or self._probe_credit_ms <= 0:
            return
        # A naive step of a long text takes seconds: only its own visitor may be kept waiting by it.
        alone = len(self.scheduler.live) == 1
        longest = self.config.max_context if alone else self.config.max_race_tokens
        asked = [s for s in self.scheduler.running if s.probe and s.length <= longest]
        due = [s for s in asked if s.length >= s.probed_at + PROBE_EVERY_TOKENS]
        if due:
            sequence = min(due, key=lambda s: s.probed_at)
            measured = probe(self.runner, self.cache, sequence)
            sequence.probed_at = sequence.length
            self._probe_credit_ms -= measured.naive_ms + measured.cached_ms
            report.probes.append(measured)

    def _race(self, report: StepReport, busy: bool) -> None:
        """One exclusive step of the race, which gets at most half of the engine's time and none while it is busy."""
        if self.race is None and self.waiting_races:
            self.race = Race(self.waiting_races.popleft(), self.runner)
        if self.race is None:
            return
        if self.race.paused != busy:
            self.race.paused = busy
            report.race_steps.append(RaceStep(self.race.request_id, "paused" if busy else "running"))
        if busy or (self.scheduler.live and self._race_credit_ms <= 0):
            return
        try:
            step = self.race.step()
        except LaneFailed as failure:
            report.failures.append(Failure(self.race.request_id, f"The race ended: {failure}"))
            self._end_race()
            return
        self._race_credit_ms -= step.step_ms
        report.race_steps.append(step)
        if self.race.finished:
            self._end_race()

    def _end_race(self) -> None:
        if self.race:
            self.race.close()
        self.race = None

    def _account(self, report: StepReport, step_ms: float) -> None:
        record = report.record
        record.step_ms, record.forward_ms = step_ms, self.runner.forward_ms
        record.decode_ms = step_ms - record.forward_ms
        # Of the forward alone: a step that made the pool grow says nothing about the next one.
        self._pace.record(record.forward_ms, record.batch_size, record.prefill_tokens)
        share = self.probe_share
        self._probe_credit_ms = min(self._probe_credit_ms + share * step_ms, MOST_CREDIT_MS) if share else 0.0
        self._race_credit_ms = min(self._race_credit_ms + step_ms, MOST_CREDIT_MS)
        report.public_tokens = self.public.tokens
        report.allocated_tokens = self.cache.allocated_tokens + self.public.tokens
        report.allocated_bytes = self.cache.allocated_bytes + self.public.nbytes
        report.padding_tokens = self._padding_tokens
        report.slots = self._slot_states()

    def _slot_states(self) -> list[SlotState]:
        live = [
            SlotState(
                s.slot,
                state,
                s.request_id,
                s.client,
                s.cached_tokens,
                len(s.prompt_ids),
                s.reused_tokens,
                s.public_tokens,
            )
            for state, group in (("running", self.scheduler.running), ("prefilling", self.scheduler.prefilling))
            for s in group
        ]
        retained = [
            SlotState(slot, "retained", kept.request_id, kept.client, len(kept.token_ids), 0)
            for slot, kept in self.scheduler.retained.items()
        ]
        return live + retained

    def _largest_shape(self) -> tuple[int, int]:
        positions = min(self.config.max_context, self.config.cache_tokens)
        return min(2 * self.config.max_batch_size, self.config.cache_tokens // positions), positions


def _unread(sequence: Sequence) -> int:
    """Tokens that are still to be computed before its next one can be chosen."""
    return sequence.length - sequence.cached_tokens


def _is_scored(sequence: Sequence) -> bool:
    """Whether its prompt's log-probabilities are wanted. One that is resumed has delivered them before."""
    return sequence.params.prompt_logprobs and not sequence.output_ids
