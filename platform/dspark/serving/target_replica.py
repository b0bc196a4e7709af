"""A replica: one engine with its target and drafter, stepped in a thread, asked through `generate`."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.serve.handle import DeploymentHandle

from dspark.chat import ChatConfig
from dspark.config import build_config
from dspark.engine.drafter_folder import NGRAM, WITHOUT_FOLDER
from dspark.engine.engine import Engine
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.remote_drafts import RemoteDrafts
from dspark.engine.request import GenerationRequest
from dspark.errors import one_line
from dspark.serving.admission import Pace, Room, refusal
from dspark.serving.background_resolver import BackgroundResolver
from dspark.serving.closed_loop import ClosedLoop
from dspark.serving.closed_loop_metrics import closed_loop_families
from dspark.serving.config import URGENT, HotConfig, ServeConfig
from dspark.serving.draft_link import ServeDraftLink
from dspark.serving.engine_client import ENGINE_STOPPED, Continuation, Delta, LoadReport
from dspark.serving.engine_loop import EngineLoop, EngineStopped
from dspark.serving.fleet_link import FleetLink, LoadMeter
from dspark.serving.metrics import ReplicaMetrics, counter, draft_link_families, engine_families, gauge, with_label
from dspark.serving.openai_schema import GenerateRequest, Refusal, RequestRefused
from dspark.serving.replica_load import CAPACITY, ReplicaLoad
from dspark.serving.resolve import RequestResolver
from dspark.serving.schedule_metrics import fleet_families, schedule_families
from dspark.serving.scheduler_actor import connect_scheduler
from dspark.serving.speculation_metrics import StepDraft
from dspark.serving.this_replica import LOCAL, end_process, replica_id, replica_number
from dspark.serving.token_logprobs import TokenTexts
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from dspark.serving.vllm_metrics import vllm_families
from dspark.speculation.fleet import ReplicaReport

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("dspark")


class TargetReplica:
    """A Serve deployment's class that also works without Serve: then it belongs to no fleet.

    Raises: DsparkError when target, drafter and calibration do not belong together, so that it never starts.
    """

    def __init__(self, config: ServeConfig, drafts: DeploymentHandle[Any] | None = None) -> None:
        """drafts: the draft replicas, where the drafter does not run here."""
        self.id = replica_id()
        self._draft_link = None if drafts is None else ServeDraftLink(drafts, replica_number())
        self._remote = None
        if self._draft_link is not None and config.draft_replicas is not None:
            self._remote = RemoteDrafts(self._draft_link, self.id, config.draft_replicas.link)
        self._config = config
        self._limits = config.limits
        self._pace = Pace()
        self._swaps = {"done": 0, "refused": 0}
        self._num_continued = 0
        self._num_calls = 0
        self._use(self._load_engine(config.drafter, None))
        self._closed_loop = ClosedLoop(config, self.id)
        self._closed_loop.use(self.loaded, config.drafter)
        is_stand_in = self.loaded.provenance is None and config.drafter not in WITHOUT_FOLDER
        self._drafter = NGRAM if is_stand_in else config.drafter
        engine = self.loaded.engine
        self._metrics = ReplicaMetrics()
        self._fleet = None
        if config.fleet.enabled and ray.is_initialized():
            self._fleet = FleetLink(config.fleet, report=self._report, connect=connect_scheduler)
            self._fleet.start()
        self._loop = EngineLoop(
            engine,
            self._metrics,
            share=self._fleet.share if self._fleet else None,
            pace=self._pace,
            on_failure=None if self.id == LOCAL else end_process,
        )
        self._loop.start()
        log.info("replica %s serves %s, drafter %s", self.id, config.target.name, engine.drafter_kind)

    async def generate(
        self, request_id: str, request: GenerateRequest, continuation: Continuation | None = None
    ) -> AsyncGenerator[Delta | Refusal, None]:
        """The answer step by step, or the rest of one; a refusal comes first, or last where something broke.

        Closing it frees all.
        """
        try:
            resolved = await self._admit(request_id, request, continuation)
        except RequestRefused as refused:
            self._metrics.count_refusal(refused.refusal.status)
            yield refused.refusal
            return
        self._num_continued += continuation is not None
        self._num_calls += 1
        index = {choice.request_id: choice.choice for choice in resolved}
        recording = self._closed_loop.begin(request, resolved)
        outputs = self._loop.generate(*recording.requests, timeout_s=self._limits.request_timeout_s)
        prompt_ids = resolved[0].prompt_ids if request.return_token_ids else None
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    recording.add(output)
                    yield Delta(
                        output.text,
                        output.token_ids,
                        output.finish_reason,
                        output.num_prompt_tokens,
                        output.num_output_tokens,
                        prompt_ids,
                        index[output.request_id],
                        None if output.logprobs is None else [self._token_texts.show(one) for one in output.logprobs],
                        output.num_cached_tokens,
                        StepDraft.of(output) if request.return_speculation else None,
                    )
                    prompt_ids = None  # they are told once
        except ValueError as error:
            yield Refusal(400, str(error))
        except TimeoutError as error:
            yield Refusal(504, f"the request took too long: {error}", code="timeout")
        except EngineStopped as error:
            yield Refusal(503, error.message, code=ENGINE_STOPPED)
        finally:
            recording.end()
            self._num_calls -= 1

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        """The ids that a prompt becomes."""
        return await self._resolver.tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        """The text of ids."""
        return await self._resolver.detokenize(request)

    async def load(self) -> LoadReport:
        """How it stands, for the API."""
        room, num_urgent = self._room(), self._loop.num_ahead(URGENT)
        return LoadReport(self.id, room.num_open, room.max_running, room.per_s, room.num_ahead, num_urgent)

    async def loads(self) -> list[LoadReport | None]:
        """As if it were a fleet."""
        return [await self.load()]

    async def metrics(self) -> "list[Metric]":
        """Metric families, each sample with this replica's id."""
        families = [*self._metrics.families(), *engine_families(self.loaded.engine), *self._state_families()]
        return with_label([*families, *vllm_families(families, self._config.model_name)], "replica", self.id)

    async def record_routing_stats(self) -> dict[str, float]:
        """What Serve tells the request router of this replica."""
        return self._load.routing_stats(self._num_calls)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve tells the autoscaling policy of this replica."""
        calls_per_choice = self._num_calls / max(1, self._loop.num_open) if self._num_calls else 1.0
        capacity = self._load.capacity(self._config.scaling.min_tokens_per_s)
        return {CAPACITY: capacity * min(1.0, calls_per_choice)}  # in calls: those are what Serve counts

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's name for a change of the deployment file's `user_config`, a HotConfig, while the replica runs.

        Streams pause until another drafter is loaded, and go on with it; one that draft replicas run is drafted with as
        soon as these have it, too. One that does not fit is refused: the log and /metrics say so, and all goes on with
        the one before.
        """
        named = str(user_config.get("drafter"))
        made: list[LoadedEngine] = []

        def make() -> Engine:
            made.append(self._load_engine(drafter, self.loaded))
            return made[0].engine

        try:
            drafter = build_config(HotConfig, user_config, source="user_config").drafter
            if drafter == self._drafter:
                return
            self._closed_loop.pause()
            await self._loop.replace_engine(make)
        except Exception as error:  # whatever it is: one that leaves here ends this replica, and the next one as well
            self._closed_loop.resume()
            self._swaps["refused"] += 1
            log.error("drafter %s is refused, %s goes on: %s", named, self._drafter, one_line(error))
            return
        self._swaps["done"] += 1
        self._drafter = drafter
        self._use(made[0])
        await asyncio.to_thread(self._closed_loop.use, self.loaded, drafter)
        log.info("replica %s goes on with drafter %s", self.id, self.loaded.engine.drafter_kind)

    async def check_health(self) -> None:
        """Raises: EngineStopped when the engine no longer runs; Serve then replaces the replica."""
        self._loop.check()

    async def is_healthy(self) -> bool:
        """As `check_health`."""
        self._loop.check()
        return True

    def close(self) -> None:
        """Stop the threads; open requests end with an error."""
        if self._fleet is not None:
            self._fleet.stop()
        self._loop.stop()
        self._closed_loop.close()
        if self._draft_link is not None:
            self._draft_link.close()

    def __del__(self) -> None:  # how Serve tells a replica that it ends
        if hasattr(self, "_loop"):
            self.close()

    def _load_engine(self, drafter: str | None, shared: LoadedEngine | None) -> LoadedEngine:
        config = self._config
        return load_engine(
            config.target,
            drafter,
            config=config.engine,
            num_threads=config.threads,
            length_without_curve=config.verify_length_without_curve,
            is_missing_drafter_ok=shared is None,
            profiles=config.profile_without_curve,
            shared=shared,
            remote=self._remote,
        )

    def _use(self, loaded: LoadedEngine) -> None:
        """What hangs on the engine."""
        self.loaded = loaded
        self._load = ReplicaLoad(loaded.engine, loaded.engine.policy.curve)
        self._meter = LoadMeter(loaded.engine, self.id, is_remote=self._remote is not None)
        resolver = RequestResolver(loaded, _chat(self._config, loaded), self._limits)
        self._resolver = BackgroundResolver(resolver, most_texts=self._limits.max_concurrent_requests)
        self._token_texts = TokenTexts(resolver.tokenizer)

    def _room(self, priority: int = 0) -> Room:
        return Room(
            num_open=self._loop.num_open + self._resolver.num_resolving,
            max_running=self.loaded.engine.config.max_running_requests,
            most=self._limits.most_open(priority),
            per_s=self._pace.per_s,
            num_ahead=self._loop.num_ahead(priority) + self._resolver.num_resolving,
        )

    def _report(self, sequence: int, with_curve: bool) -> ReplicaReport:
        return self._meter.report(sequence, with_curve)

    async def _admit(
        self, request_id: str, request: GenerateRequest, continuation: Continuation | None
    ) -> list[GenerationRequest]:
        """An engine request per choice that has not ended: they differ in their noise, and in what they have so far."""
        most = self._limits.max_concurrent_requests
        if request.n > most:
            raise RequestRefused.of(f"n is {request.n}; this server allows {most}", param="n")
        output_ids = dict.fromkeys(range(request.n), ()) if continuation is None else continuation.output_ids
        room = self._room(request.priority)
        refused = refusal(room, self._limits, num_new=len(output_ids), may_wait=continuation is not None)
        if refused is not None:
            raise RequestRefused(refused)
        resolved = await self._resolver.resolve(request_id, request, num_choices=len(output_ids))
        return [
            replace(resolved, request_id=f"{request_id}-{choice}", choice=choice, output_ids=ids)
            for choice, ids in output_ids.items()
        ]

    def _state_families(self) -> "list[Metric]":
        """What is fixed from the start, what was found missing then, and how it stands with the fleet."""
        engine = self.loaded.engine
        families = [gauge("drafter_info", "The drafter in use.", 1, {"kind": engine.drafter_kind})]
        if self._remote is not None and self.loaded.provenance is not None:
            families += draft_link_families(self._remote.stats)
        text = "Answers that another replica began and this one went on with."
        families.append(counter("requests_continued", text, self._num_continued))
        for outcome, number in self._swaps.items():
            text = "Drafters that were to take the running one's place."
            families.append(counter("drafter_swaps", text, number, {"outcome": outcome}))
        for note in self.loaded.notes:
            families.append(gauge("notice", "What was missing when the replica started.", 1, {"text": note}))
        if engine.policy.verify_length is not None:
            text = "Draft tokens every step verifies; absent when the scheduler decides."
            families.append(gauge("fixed_verify_length", text, engine.policy.verify_length))
        families += schedule_families(engine)
        families += closed_loop_families(self._closed_loop)
        if self._fleet is not None:
            families += fleet_families(self._fleet)
        return families


def _chat(config: ServeConfig, loaded: LoadedEngine) -> ChatConfig:
    if config.chat is not None or loaded.provenance is None:
        return config.chat or ChatConfig()
    return build_config(ChatConfig, loaded.provenance["chat"], source="provenance.json of the drafter")
