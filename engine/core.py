"""The engine's turn: admit, one pass over all running rows and chunks of prompts, choose, report.

Single-threaded and steppable by hand; it knows token ids and nothing of text, processes or pages.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from engine.config import EngineConfig
from engine.grammar import GrammarError, Grammars
from engine.kv_cache import KVCache
from engine.measuring import Measuring
from engine.memory import NO_ROOM, is_out_of_memory
from engine.pace import Pace
from engine.processors import Row
from engine.public import PublicPrefixes
from engine.runner import Chunk, ModelRunner
from engine.sampler import choose
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.wire import Failure, PromptLogprobs, SlotState, StartRace, StepRecord, StepReport, Token

NOT_FINITE = "The model produced numbers that are not finite for this text, so its answer ends here."
NO_CHOICE = "Choosing the next token failed ({}), so this answer ends here. Try it with other settings."
MOST_SCORED_TOKENS = 128  # whose logits, one vocabulary a token, are held at once

logger = logging.getLogger(__name__)


@dataclass
class Turn:
    """What one pass has computed, before anything of it counts: if memory runs out meanwhile, nothing has happened."""

    running: list[Sequence]
    chunks: list[tuple[Sequence, Chunk]]
    chosen: list[Sequence] = field(default_factory=list)  # whose next token there is now
    outcomes: list[Token | Failure] = field(default_factory=list)  # of those


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
        self.measuring = Measuring(runner, self.scheduler, config)
        self._padding_tokens = 0
        self._pace = Pace(config.prefill_chunk)

    @property
    def cache(self) -> KVCache:
        return self.scheduler.cache

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.live or self.measuring.has_work)

    def submit(self, sequence: Sequence) -> None:
        self.scheduler.waiting.append(sequence)

    def start_race(self, race: StartRace) -> None:
        """Queue a race; one runs at a time."""
        self.measuring.waiting.append(race)

    def cancel(self, request_id: int) -> None:
        """Forget a sequence or a race; its row is free for the next step."""
        self.measuring.cancel(request_id)
        for sequence in [*self.scheduler.live, *self.scheduler.waiting]:
            if sequence.request_id == request_id:
                self.scheduler.release(sequence, retain=True)

    def park(self) -> None:
        """Put everything aside: who comes back goes on from its keys and values, unless their room was needed."""
        self.measuring.clear()
        self.scheduler.park()

    @torch.no_grad()
    def step(self, begins: Callable[[list[int]], None] = lambda request_ids: None) -> StepReport:
        """One turn. `begins` is told of sequences and races before they are computed for the first time."""
        report = StepReport(StepRecord(time=time.monotonic()))
        self._padding_tokens = 0
        self.measuring.step(report, begins)
        started = time.perf_counter()
        self.runner.stopwatch.take_ms()  # that of probes and races
        self._deliver(self._turn(report, begins), report)
        self._account(report, 1000 * (time.perf_counter() - started))
        return report

    def _turn(self, report: StepReport, begins: Callable[[list[int]], None]) -> Turn:
        """Admit and compute; while memory runs out, with less and less."""
        first = True
        while True:
            try:
                while sequence := self.scheduler.admit_next():
                    begins([sequence.request_id])
                turn = self._compute(report)
                self.scheduler.fitted()
                return turn
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Behind the handler, which holds on to what the failed attempt had allocated.
            self._give_up(report, first)
            first = False

    def _give_up(self, report: StepReport, first: bool) -> None:
        """What is retained goes first, then a race; then the newest sequence waits again. One that is alone fails."""
        if (self.scheduler.shrink() and first) or self.measuring.give_up(report):
            return
        newest = self.scheduler.put_back_newest()
        if newest:
            report.put_back.append(newest.request_id)
            self.scheduler.shrink()
        else:
            self._fail([*self.scheduler.live, *self.scheduler.waiting][0], NO_ROOM, report)

    def _compute(self, report: StepReport) -> Turn:
        """One pass: the pending token of every running sequence, and chunks of prompts; then their next tokens."""
        turn = Turn(list(self.scheduler.running), self._next_chunks())
        if not turn.running and not turn.chunks:
            return turn
        token_ids, positions = [s.last_token_id for s in turn.running], [s.cached_tokens for s in turn.running]
        decoded, read = self.runner.step(self.cache, token_ids, positions, [chunk for _, chunk in turn.chunks])
        rows: list[torch.Tensor] = []
        unfinished: list[tuple[int, torch.Tensor]] = []
        for (sequence, chunk), logits in zip(turn.chunks, read, strict=True):
            end = chunk.start + len(chunk.token_ids)
            last = logits[-1:] if chunk.every else logits[None]
            if chunk.every:
                self._score_prompt(sequence, chunk.start, logits, report)
            if end == sequence.length:
                turn.chosen.append(sequence)
                rows.append(last)
            else:
                unfinished.append((sequence.request_id, last))
        turn.outcomes += _spoilt(unfinished)
        turn.chosen += turn.running
        if decoded is not None:
            rows.append(decoded)
        if turn.chosen:
            turn.outcomes += self._choose(turn.chosen, torch.cat(rows) if len(rows) > 1 else rows[0])
        return turn

    def _deliver(self, turn: Turn, report: StepReport) -> None:
        """Make it count: what is cached now, who failed, and a token for each of the others."""
        for sequence, chunk in turn.chunks:
            sequence.cached_tokens += len(chunk.token_ids)
            report.record.prefill_tokens += len(chunk.token_ids)
        if turn.running:
            self._take_rows(turn.running, report.record)
        sequences = {s.request_id: s for s in self.scheduler.live}
        failures = [outcome for outcome in turn.outcomes if isinstance(outcome, Failure)]
        for failure in failures:
            self._fail(sequences.pop(failure.request_id), failure.message, report)
        for sequence, _ in turn.chunks:
            if sequence.request_id in sequences:
                self.public.keep(sequence)
        for outcome in turn.outcomes:
            if isinstance(outcome, Token):
                self._emit(sequences[outcome.request_id], outcome, report)

    def _next_chunks(self) -> list[tuple[Sequence, Chunk]]:
        """Prompt tokens for this step: at least half for who came first, the rest for those who need the fewest."""
        chunks: list[tuple[Sequence, Chunk]] = []
        budget = self._pace.budget(len(self.scheduler.running), len(self.scheduler.prefilling))
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

    def _take_rows(self, running: list[Sequence], record: StepRecord) -> None:
        record.batch_size = len(running)
        for sequence in running:
            sequence.cached_tokens += 1
        lengths = [sequence.cached_tokens for sequence in running]
        self._padding_tokens = self.runner.positions_read(self.cache, lengths) - sum(lengths)

    def _score_prompt(self, sequence: Sequence, start: int, logits: torch.Tensor, report: StepReport) -> None:
        """Log-probabilities of the prompt tokens that `logits` `[tokens, vocabulary]` from `start` on predict."""
        ids = sequence.prompt_ids[start + 1 : start + 1 + len(logits)]
        predicted = torch.tensor(ids, dtype=torch.long, device=logits.device)
        scores = logits[: len(predicted)].log_softmax(dim=-1).gather(1, predicted[:, None])[:, 0]
        sequence.prompt_logprobs = [None, *sequence.prompt_logprobs[1 : start + 1], *scores.tolist()]
        if start + len(logits) == sequence.length:
            report.prompt_logprobs.append(PromptLogprobs(sequence.request_id, sequence.prompt_logprobs))

    def _choose(self, sequences: list[Sequence], logits: torch.Tensor) -> list[Token | Failure]:
        """A token for each row of `logits` `[sequences, vocabulary]`, or why there is none."""
        try:
            return self._choose_together(sequences, logits)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if len(sequences) > 1:  # whose fault it is shows when each is alone
                rows = zip(sequences, logits.split(1), strict=True)
                return [outcome for sequence, row in rows for outcome in self._choose([sequence], row)]
            logger.error("Choosing the next token of request %d failed.", sequences[0].request_id, exc_info=error)
            return [Failure(sequences[0].request_id, NO_CHOICE.format(type(error).__name__))]

    def _choose_together(self, sequences: list[Sequence], logits: torch.Tensor) -> list[Token | Failure]:
        allowed, stuck = self._allowed(sequences)
        rows = [
            Row(s.params, s.seed, len(s.output_ids), s.slot, s.length, allowed.get(s.request_id)) for s in sequences
        ]
        choice = choose(logits, rows, self.cache.token_ids)
        columns = (choice.token_ids, choice.logprobs, choice.top_tokens, choice.finite)
        outcomes: list[Token | Failure] = []
        for sequence, token_id, logprob, top_tokens, finite in zip(sequences, *columns, strict=True):
            number = sequence.request_id
            if not finite:
                outcomes.append(Failure(number, NOT_FINITE))
            elif number in stuck:
                outcomes.append(Failure(number, stuck[number]))
            else:
                outcomes.append(Token(number, token_id, logprob, top_tokens=top_tokens))
        return outcomes

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
        if sequence in self.scheduler.live:
            self.cache.clear(sequence.slot)
        self.scheduler.release(sequence, retain=False)

    def _account(self, report: StepReport, step_ms: float) -> None:
        record = report.record
        record.step_ms, record.forward_ms = step_ms, self.runner.stopwatch.take_ms()
        record.decode_ms = step_ms - record.forward_ms
        # Of the forward alone: a step that made the pool grow says nothing about the next one.
        self._pace.record(record.forward_ms, record.batch_size, record.prefill_tokens)
        self.measuring.account(step_ms)
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


def _spoilt(chunks: list[tuple[int, torch.Tensor]]) -> list[Token | Failure]:
    """Failures of those whose last logits `[1, vocabulary]` are not finite: what is cached of them may be as spoilt."""
    if not chunks:
        return []
    finite = torch.cat([logits for _, logits in chunks]).logsumexp(dim=-1).isfinite().tolist()
    return [Failure(number, NOT_FINITE) for (number, _), good in zip(chunks, finite, strict=True) if not good]


def _unread(sequence: Sequence) -> int:
    """Tokens that are still to be computed before its next one can be chosen."""
    return sequence.length - sequence.cached_tokens


def _is_scored(sequence: Sequence) -> bool:
    """Whether its prompt's log-probabilities are wanted. One that is resumed has delivered them before."""
    return sequence.params.prompt_logprobs and not sequence.output_ids
