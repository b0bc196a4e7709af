"""A replica: one engine with its target and drafter, stepped in a thread, asked through `generate`."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from dspark.chat import ChatConfig
from dspark.config import build_config
from dspark.engine.loading import LoadedEngine, load_engine
from dspark.engine.remote_drafts import RemoteDrafts
from dspark.engine.request import GenerationRequest
from dspark.engine.step import StepOutput
from dspark.serving.config import ServeConfig
from dspark.serving.draft_link import ServeDraftLink
from dspark.serving.engine_client import Delta
from dspark.serving.engine_loop import EngineLoop, EngineStopped
from dspark.serving.fleet_link import FleetLink, LoadMeter
from dspark.serving.metrics import ReplicaMetrics, draft_link_families, engine_families, gauge, with_label
from dspark.serving.openai_schema import GenerateRequest, Refusal, RequestRefused
from dspark.serving.resolve import RequestResolver
from dspark.serving.schedule_metrics import fleet_families, schedule_families
from dspark.serving.scheduler_actor import connect_scheduler
from dspark.serving.speculation_metrics import StepDraft
from dspark.serving.token_logprobs import TokenTexts
from dspark.serving.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from dspark.serving.vllm_metrics import vllm_families

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger("dspark")


class TargetReplica:
    """A Serve deployment's class that also works without Serve: then it belongs to no fleet.

    Raises: DsparkError when target, drafter and calibration do not belong together, so that it never starts.
    """

    def __init__(self, config: ServeConfig, drafts: DeploymentHandle[Any] | None = None) -> None:
        """drafts: the draft replicas, where the drafter does not run here."""
        self.id = _replica_id()
        self._draft_link = None if drafts is None else ServeDraftLink(drafts, self.id)
        self._remote = None
        if self._draft_link is not None and config.draft_replicas is not None:
            self._remote = RemoteDrafts(self._draft_link, self.id, config.draft_replicas.link)
        self.loaded = load_engine(
            config.target,
            config.drafter,
            config=config.engine,
            num_threads=config.threads,
            length_without_curve=config.verify_length_without_curve,
            is_missing_drafter_ok=True,
            profiles=config.profile_without_curve,
            remote=self._remote,
        )
        engine = self.loaded.engine
        self._limits = config.limits
        self._model_name = config.model_name
        self._resolver = RequestResolver(self.loaded, _chat(config, self.loaded), config.limits)
        self._token_texts = TokenTexts(self._resolver.tokenizer)
        self._metrics = ReplicaMetrics()
        self._fleet = None
        if config.fleet.enabled and ray.is_initialized():
            meter = LoadMeter(engine, self.id)
            self._fleet = FleetLink(config.fleet, report=meter.report, connect=connect_scheduler)
            self._fleet.start()
        self._loop = EngineLoop(engine, self._metrics, share=self._fleet.share if self._fleet else None)
        self._loop.start()
        log.info("replica %s serves %s, drafter %s", self.id, config.target.name, engine.drafter_kind)

    async def generate(self, request_id: str, request: GenerateRequest) -> AsyncGenerator[Delta | Refusal, None]:
        """The answer step by step; a refusal comes first, or last where something broke. Closing it frees all."""
        try:
            resolved = self._admit(request_id, request)
        except RequestRefused as refused:
            self._metrics.count_refusal(refused.refusal.status)
            yield refused.refusal
            return
        index = {choice.request_id: choice.choice for choice in resolved}
        outputs = self._loop.generate(*resolved, timeout_s=self._limits.request_timeout_s)
        prompt_ids = resolved[0].prompt_ids if request.return_token_ids else None
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
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
                        _draft(output) if request.return_speculation else None,
                    )
                    prompt_ids = None  # they are told once
        except ValueError as error:
            yield Refusal(400, str(error))
        except TimeoutError as error:
            yield Refusal(504, f"the request took too long: {error}", code="timeout")
        except EngineStopped as error:
            yield Refusal(503, error.message, code="engine_stopped")

    async def tokenize(self, request: TokenizeRequest) -> TokenizeAnswer | Refusal:
        """The ids that a prompt becomes."""
        try:
            return self._resolver.tokenize(request)
        except RequestRefused as refused:
            return refused.refusal

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeAnswer | Refusal:
        """The text of ids."""
        try:
            return self._resolver.detokenize(request)
        except RequestRefused as refused:
            return refused.refusal

    async def metrics(self) -> "list[Metric]":
        """Metric families, each sample with this replica's id."""
        families = [*self._metrics.families(), *engine_families(self.loaded.engine), *self._state_families()]
        return with_label([*families, *vllm_families(families, self._model_name)], "replica", self.id)

    async def check_health(self) -> None:
        """Raises: EngineStopped when the engine no longer runs; Serve then replaces the replica."""
        self._loop.check()

    def close(self) -> None:
        """Stop the threads; open requests end with an error."""
        if self._fleet is not None:
            self._fleet.stop()
        self._loop.stop()
        if self._draft_link is not None:
            self._draft_link.close()

    def __del__(self) -> None:  # how Serve tells a replica that it ends
        if hasattr(self, "_loop"):
            self.close()

    def _admit(self, request_id: str, request: GenerateRequest) -> list[GenerationRequest]:
        """An engine request per choice: they differ in their noise alone."""
        most = self._limits.max_concurrent_requests
        if request.n > most:
            raise RequestRefused.of(f"n is {request.n}; this server allows {most}", param="n")
        if self._loop.num_open + request.n > most:
            message = f"{most} requests are running or waiting; try again later"
            raise RequestRefused.of(message, code="rate_limit_exceeded", status=429)
        resolved = self._resolver.resolve(request_id, request)
        return [replace(resolved, request_id=f"{request_id}-{choice}", choice=choice) for choice in range(request.n)]

    def _state_families(self) -> "list[Metric]":
        """What is fixed from the start, what was found missing then, and how it stands with the fleet."""
        engine = self.loaded.engine
        families = [gauge("drafter_info", "The drafter in use.", 1, {"kind": engine.drafter_kind})]
        if self._remote is not None and self.loaded.provenance is not None:
            families += draft_link_families(self._remote.stats)
        for note in self.loaded.notes:
            families.append(gauge("notice", "What was missing when the replica started.", 1, {"text": note}))
        if engine.policy.verify_length is not None:
            text = "Draft tokens every step verifies; absent when the scheduler decides."
            families.append(gauge("fixed_verify_length", text, engine.policy.verify_length))
        families += schedule_families(engine)
        if self._fleet is not None:
            families += fleet_families(self._fleet)
        return families


def _chat(config: ServeConfig, loaded: LoadedEngine) -> ChatConfig:
    if config.chat is not None or loaded.provenance is None:
        return config.chat or ChatConfig()
    return build_config(ChatConfig, loaded.provenance["chat"], source="provenance.json of the drafter")


def _draft(output: StepOutput) -> StepDraft | None:
    """What speculation did in a decode; None for the step that read the prompt."""
    done = output.round
    if done is None:
        return None
    num_accepted = min(done.num_accepted, done.num_committed)  # an accepted token behind a stop is not output
    return StepDraft(output.num_drafted, done.num_proposed, num_accepted, done.num_committed)


def _replica_id() -> str:
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return "local"
