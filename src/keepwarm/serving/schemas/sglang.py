"""Bodies of SGLang's own protocol. The type of a parameter that accepts only one value says so, and null is what a
parameter is if it is left out: SGLang's own clients send both."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from keepwarm.serving.schemas.common import Body, CacheSalt, KeepwarmShown, ModelName, ReuseMode, Shown, Stop, StopList
from keepwarm.serving.schemas.common import TokenIds as StopIds
from keepwarm.serving.schemas.openai import Ids, Number

Text = Annotated[str, Field(min_length=1)]


class SamplingParams(Body):
    max_new_tokens: int | None = Field(None, ge=1, description="128 without it")
    temperature: Number | None = Field(None, ge=0, le=2, description="1 without it")
    top_p: Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: all tokens")
    min_p: Number | None = Field(None, ge=0, le=1)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, gt=0, le=10)
    min_new_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | StopList | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: Literal[False] | None = None
    json_schema: None = Field(None, description="OpenAI's protocol has answers by a schema")
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    stop_regex: None = None


def _many(value: Any) -> str:
    """Return which branch of a prompt's field a value is checked against. Errors leave these names out."""
    several = isinstance(value, list) and (not value or not isinstance(value[0], int))
    return "<several>" if several else "<one>"


class GenerateRequest(Body):
    text: (
        Annotated[
            Annotated[Text, Tag("<one>")]
            | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("<several>")],
            Discriminator(_many),
        ]
        | None
    ) = None
    input_ids: (
        Annotated[
            Annotated[Ids, Tag("<one>")] | Annotated[list[Ids], Field(min_length=1, fail_fast=True), Tag("<several>")],
            Discriminator(_many),
        ]
        | None
    ) = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    logprob_start_len: Literal[-1] | None = Field(None, description="only the answer's tokens have log-probabilities")
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(None, description="the answer's id")
    token_ids_logprob: None = None
    return_hidden_states: Literal[False] | None = None
    return_routed_experts: Literal[False] | None = None
    image_data: None = None
    video_data: None = None
    audio_data: None = None
    lora_path: None = Field(None, description="the field model names an adapter")
    session_params: None = None
    custom_logit_processor: None = None
    log_metrics: bool | None = Field(None, description="changes nothing")
    model: ModelName | None = Field(None, description="not SGLang's; the first of those served without")
    cache_salt: CacheSalt | None = Field(None, description="not SGLang's")
    reuse: ReuseMode | None = Field(None, description="weakest exactness allowed; not SGLang's")

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("exactly one of text and input_ids is expected")
        return self

    @property
    def sampling(self) -> SamplingParams:
        return self.sampling_params or SamplingParams.model_validate({})

    @property
    def prompts(self) -> list[str | list[int]]:
        if self.text is not None:
            return [self.text] if isinstance(self.text, str) else list(self.text)
        assert self.input_ids
        return [self.input_ids] if isinstance(self.input_ids[0], int) else list(self.input_ids)

    @property
    def listed(self) -> bool:
        """Whether the answer is a list."""
        many = self.text if self.text is not None else self.input_ids and self.input_ids[0]
        return isinstance(many, list) or (self.sampling.n or 1) > 1


class MetaInfo(Shown):
    id: str
    finish_reason: dict[str, Any] | None = Field(description="null while a stream goes on")
    completion_tokens: int
    prompt_tokens: int | None = Field(None, description="like all that follows it, when the answer is complete")
    cached_tokens: int | None = None
    e2e_latency: float | None = Field(None, description="seconds")
    output_token_logprobs: list[tuple[float, int, str | None]] | None = Field(
        None, description="with return_logprob, for each token: its log-probability, id, and text if asked for"
    )
    output_top_logprobs: list[list[tuple[float, int, str | None]]] | None = None
    keepwarm: KeepwarmShown | None = None


class Generated(Shown):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = Field(None, description="of several answers that are streamed")


class Flushed(Shown):
    success: bool
    message: str
