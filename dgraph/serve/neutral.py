"""Fields that other servers know and this one cannot serve, with their neutral values, which ask for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Neutral:
    """A field that is not served.

    Attributes:
        values: neutral values, at which the field asks for nothing; null always is one.
        any: True if every value is neutral, because the field changes no answer.
        instead: a field that asks for the same here; "" for none.
    """

    values: tuple[Any, ...] = ()
    any: bool = False
    instead: str = ""

    def allows(self, value: Any) -> bool:
        """True for a value that asks for nothing."""
        same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)  # 0 == False
        return self.any or value is None or any(same)

    @property
    def advice(self) -> str:
        """A sentence for a client that sent another value."""
        use = f"use {self.instead}, or " if self.instead else ""
        ways = "".join(f", or send {json.dumps(value)}" for value in self.values)
        return f"{use}omit it{ways}"

    @property
    def schema(self) -> dict[str, Any]:
        """The values as a JSON schema."""
        said = "Changes no answer here." if self.any else f"Not served: {self.advice}."
        return {"description": said} if self.any else {"enum": [None, *self.values], "description": said}


def only(*values: Any, instead: str = "") -> Neutral:
    """A field that asks for something except at these values and null."""
    return Neutral(values, instead=instead)


ANY = Neutral(any=True)

TEMPLATE = "chat_template_kwargs"

ASKED: Mapping[str, Neutral] = {
    # -- OpenAI --------------------------------------------------------------------------------------------------------
    "audio": only(),
    "best_of": only(1),
    "echo": only(False),
    "frequency_penalty": only(0),
    "function_call": only("none"),
    "functions": only([]),
    "logit_bias": only({}),
    "metadata": ANY,
    "modalities": only(["text"]),
    "moderation": only(),
    "parallel_tool_calls": ANY,
    "prediction": only(),
    "presence_penalty": only(0),
    "prompt_cache_key": ANY,
    "prompt_cache_options": ANY,
    "prompt_cache_retention": ANY,
    "reasoning": only(instead=TEMPLATE),
    "reasoning_effort": only(instead=TEMPLATE),
    "response_format": only({"type": "text"}),
    "safety_identifier": ANY,
    "service_tier": only("auto", "default"),
    "store": only(False),
    "suffix": only(""),
    "tool_choice": only("none", "auto"),
    "tools": only([]),
    "top_logprobs": only(0),
    "user": ANY,
    "verbosity": only("medium"),
    "web_search_options": only(),
    # -- what a response must look like --------------------------------------------------------------------------------
    "ebnf": only(""),
    "format": only(""),
    "grammar": only(""),
    "grammar_lazy": only(False),
    "grammar_triggers": only([]),
    "guided_choice": only(),
    "guided_decoding": only(),
    "guided_decoding_backend": only(),
    "guided_grammar": only(),
    "guided_json": only(),
    "guided_json_object": only(False),
    "guided_regex": only(),
    "guided_whitespace_pattern": only(),
    "json_schema": only(),
    "regex": only(""),
    "structural_tag": only(),
    "structured_outputs": only(),
    # -- which tokens it may have --------------------------------------------------------------------------------------
    "allowed_token_ids": only(),
    "bad_words": only([]),
    "bad_words_ids": only([]),
    "custom_logit_processor": only(),
    "force_words_ids": only([]),
    "logits_processor_args": only(),
    "logits_processors": only([]),
    "no_repeat_ngram_size": only(0),
    "sequence_bias": only(),
    "suppress_tokens": only([]),
    # -- samplers ------------------------------------------------------------------------------------------------------
    "do_sample": only(instead="temperature"),
    "dry_allowed_length": only(2),
    "dry_base": only(1.75),
    "dry_multiplier": only(0),
    "dry_penalty_last_n": only(-1, 0),
    "dry_sequence_breakers": only([], ["\n", ":", '"', "*"]),
    "dynamic_temperature": only(False),
    "dynatemp_exponent": only(1),
    "dynatemp_high": only(),
    "dynatemp_low": only(),
    "dynatemp_range": only(0),
    "encoder_repetition_penalty": only(1),
    "epsilon_cutoff": only(0),
    "eta_cutoff": only(0),
    "guidance_scale": only(1),
    "min_keep": only(0),
    "min_p": only(0),
    "mirostat": only(0),
    "mirostat_eta": only(0.1),
    "mirostat_mode": only(0),
    "mirostat_tau": only(5),
    "nsigma": only(-1, 0),
    "penalize_nl": only(False),
    "penalty_alpha": only(0),
    "penalty_prompt": only(),
    "random_seed": only(instead="seed"),
    "repeat_last_n": only(64),
    "repeat_penalty": only(1),
    "repetition_detection": only(),
    "repetition_penalty": only(1),
    "sampler_order": only([]),
    "sampler_priority": only([]),
    "samplers": only([]),
    "sampling_params": only({}),
    "smoothing_curve": only(1),
    "smoothing_factor": only(0),
    "temperature_last": only(False),
    "tfs": only(1),
    "tfs_z": only(1),
    "top_a": only(0),
    "top_n_sigma": only(-1, 0),
    "typical": only(1),
    "typical_p": only(1),
    "watermark": only(False),
    "xtc_probability": only(0),
    "xtc_threshold": only(0.1),
    # -- search --------------------------------------------------------------------------------------------------------
    "beam_width": only(1),
    "diversity_penalty": only(0),
    "early_stopping": only(False),
    "length_penalty": only(1),
    "n_cmpl": only(1, instead="n"),
    "num_beam_groups": only(1),
    "num_beams": only(1),
    "num_return_sequences": only(1, instead="n"),
    "use_beam_search": only(False),
    # -- where it ends -------------------------------------------------------------------------------------------------
    "include_stop_str_in_output": only(False),
    "max_length": only(instead="max_tokens"),
    "max_new_tokens": only(instead="max_tokens"),
    "min_length": only(0, instead="min_tokens"),
    "min_new_tokens": only(0, instead="min_tokens"),
    "n_indent": only(0),
    "n_predict": only(instead="max_tokens"),
    "no_stop_trim": only(False),
    "num_predict": only(instead="max_tokens"),
    "stop_regex": only([]),
    "stop_sequences": only([], instead="stop"),
    "stop_strings": only([], instead="stop"),
    "stop_token_ids": only([]),
    "t_max_predict_ms": only(0, -1),
    "t_max_prompt_ms": only(0, -1),
    # -- the prompt ----------------------------------------------------------------------------------------------------
    "add_generation_prompt": only(),
    "add_special_tokens": only(True),
    "audio_data": only([]),
    "chat_template": only(),
    "chat_template_content_format": only("auto", "string"),
    TEMPLATE: only({}),
    "context": only([]),
    "continue_final_message": only(False),
    "documents": only([]),
    "image_data": only([]),
    "images": only([]),
    "input_embeds": only(),
    "input_ids": only(instead="prompt"),
    "media_io_kwargs": only({}),
    "mm_processor_kwargs": only({}),
    "n_discard": only(0),
    "n_keep": only(0),
    "prompt_embeds": only(),
    "raw": only(False),
    "safe_prompt": only(False),
    "system": only(),
    "template": only(),
    "token_healing": only(False),
    "truncate": only(),
    "truncate_prompt_tokens": only(),
    "truncation_side": only(),
    "use_audio_in_video": only(False),
    "video_data": only([]),
    # -- thinking ------------------------------------------------------------------------------------------------------
    "enable_thinking": only(instead=TEMPLATE),
    "include_reasoning": only(True),
    "prompt_mode": only(),
    "reasoning_budget": only(-1),
    "reasoning_format": only("auto", "none"),
    "separate_reasoning": only(True),
    "stream_reasoning": only(True),
    "think": only(instead=TEMPLATE),
    "thinking": only(instead=TEMPLATE),
    "thinking_budget": only(),
    "thinking_forced_open": only(False),
    "thinking_token_budget": only(),
    # -- the text and what comes beside it -----------------------------------------------------------------------------
    "decoder_input_details": only(False),
    "details": only(False),
    "detokenize": only(True),
    "logprob_start_len": only(-1),
    "logprob_token_ids": only([]),
    "n_probs": only(0),
    "post_sampling_probs": only(False),
    "prompt_logprobs": only(),
    "return_full_text": only(False),
    "return_hidden_states": only(False),
    "return_logprob": only(False, instead="logprobs"),
    "return_progress": only(False),
    "return_text_in_logprobs": only(False),
    "return_token_ids": only(False, instead="return_step_map"),
    "return_tokens": only(False, instead="return_step_map"),
    "return_tokens_as_token_ids": only(False),
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    "timings_per_token": only(False),
    "token_ids_logprob": only([]),
    "top_logprobs_num": only(0),
    "top_n_tokens": only(0),
    # -- other weights -------------------------------------------------------------------------------------------------
    "adapter_id": only(),
    "adapter_source": only(),
    "adapters": only([]),
    "lora": only([]),
    "lora_id": only(),
    "lora_path": only(),
    "lora_request": only(),
    # -- how a server works on it --------------------------------------------------------------------------------------
    "cache_prompt": ANY,
    "cache_salt": only(),
    "custom_labels": ANY,
    "custom_params": only(),
    "data_parallel_rank": only(),
    "ec_transfer_params": only(),
    "extra_key": only(),
    "id_slot": only(-1),
    "keep_alive": ANY,
    "kv_transfer_params": only(),
    "options": only({}),
    "priority": only(0),
    "request_id": ANY,
    "rid": ANY,
    "session_params": only({}),
    "slot_id": only(-1),
    "vllm_xargs": only(),
}
"""Fields of a request for text. A request that declares one of them takes it at other values, too."""

CHAT: Mapping[str, Neutral] = {**ASKED, "add_special_tokens": only(False)}
"""Fields of a chat, whose template writes the special tokens."""

MESSAGE: Mapping[str, Neutral] = {
    "annotations": ANY,
    "audio": only(),
    "cache_control": ANY,
    "function_call": only(),
    "id": ANY,
    "images": only([]),
    "partial": only(False, instead="continue_final_message"),
    "prefix": only(False, instead="continue_final_message"),
    "provider_specific_fields": ANY,
    "reasoning": ANY,
    "reasoning_content": ANY,
    "refusal": only(),
    "thinking": ANY,
    "tool_name": ANY,
    "weight": ANY,
}
"""Fields of a message. All of it reaches the chat template."""

PART: Mapping[str, Neutral] = {
    "annotations": ANY,
    "cache_control": ANY,
    "logprobs": ANY,
    "prompt_cache_breakpoint": ANY,
}
"""Fields of a part of a message that is a text."""

CALL: Mapping[str, Neutral] = {
    "custom": only(),
    "extra_content": ANY,
    "index": ANY,
    "provider_specific_fields": ANY,
}
"""Fields of a call of a tool in an assistant's earlier turn."""

STREAM: Mapping[str, Neutral] = {"include_obfuscation": ANY}
"""Fields of `stream_options`."""

DECISION: Mapping[str, Neutral] = {
    name: ASKED[name]
    for name in ("metadata", "prompt_cache_key", "prompt_cache_options", "safety_identifier", "store", "user")
}
"""Fields of a request for decisions."""

TURN: Mapping[str, Neutral] = {"id": ANY, "phase": ANY, "status": ANY, "type": only("message")}
"""Fields of a message of their input."""
