"""Argument names of other libraries, and their counterparts in dgraph."""

from __future__ import annotations

from collections.abc import Mapping

_DTYPE = "Use dtype (of dgraph.load and dgraph.optimize); 'auto' is what the checkpoint has."
_WEIGHTS = "Quantised weights are asked for by weights='fp8', 'int8' or 'int4' of dgraph.optimize."
_DEVICE = "Use device='cuda' (one device); mesh= of dgraph.optimize divides a model over several."
_LENGTH = "Use max_new_tokens, which counts the tokens of the response alone."
_ROOM = "Positions of a request are max_tokens of CompiledModel.engine, and those of a model the fact max_positions."
_DRAW = "Use temperature: 0 takes the most likely token, above it tokens are drawn."
_BEAMS = "There is no beam search: tokens are committed once, several in a step."
_SEVERAL = "Give the prompt several times: every place in the list of prompts draws by itself."
_CODE = "Leave it out: no code of a checkpoint is run, its weights go into a class that is known."
_MESH = "Use mesh= of dgraph.optimize (dgraph.parallel.init), or --tp on the command line."
_ATTENTION = "Leave it out: dgraph has its own attention, which masks as the model's family says."
_ENDS = (
    "Ids that end a response are stop_token_ids=[...] of generate, or the fact eos_ids: facts={'eos_ids': (2,)} of "
    "dgraph.optimize, eos_ids= of load."
)
_STOP = "Texts that end a response are stop=[...]; ids are the fact eos_ids."
_PROMPTS = "Use prompts, the first argument of generate: texts, or conversations as lists of messages."
_IDS = "Use input_ids, one list of ids per prompt."
_STREAM = (
    "Use CompiledModel.engine: engine.stream(prompt) gives text as it becomes final; observer= and progress= of "
    "generate are called with every step."
)
_SAMPLER = "Use sampler=dgraph.Sampler(...) of generate: its processors, suppress and penalty_lambda change logits."
_GUIDANCE = "Use sampler=dgraph.Sampler(cfg_scale=...) of generate."
_POLICY = "Use policy=, a decoding rule by name; `dgraph policies` lists them."
_CACHE = "Leave it out: the recipe says which keys and values are kept; `dgraph recipes` lists them."
_GRAPHS = "Use graphs=False of dgraph.optimize for no CUDA graphs, or backend='eager' to run op by op."
_PACKED = "Leave it out: prompts are packed without padding, so there is nothing to mask."
_NOTHING = "Leave it out: weights are read one by one from the folder."

HINTS: Mapping[str, str] = {
    "torch_dtype": _DTYPE,
    "precision": _DTYPE,
    "device_map": _DEVICE,
    "device_ids": _DEVICE,
    "num_gpus": _MESH,
    "tensor_parallel_size": _MESH,
    "tp": _MESH,
    "tp_size": _MESH,
    "tp_plan": _MESH,
    "max_length": _LENGTH,
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "gen_length": _LENGTH,
    "min_new_tokens": "Use min_tokens.",
    "min_length": "Use min_tokens.",
    "max_model_len": _ROOM,
    "max_seq_len": _ROOM,
    "max_num_seqs": "Use max_sequences of CompiledModel.engine.",
    "max_num_batched_tokens": "Use max_batched_rows of CompiledModel.engine.",
    "gpu_memory_utilization": "Use kv_bytes of CompiledModel.engine, the memory of keys and values.",
    "enable_prefix_caching": "Use prefix_cache of CompiledModel.engine.",
    "kv_cache_dtype": "Use kv_dtype='fp8', an option of recipes that keep keys and values.",
    "do_sample": _DRAW,
    "num_beams": _BEAMS,
    "beam_width": _BEAMS,
    "num_return_sequences": _SEVERAL,
    "n": _SEVERAL,
    "trust_remote_code": _CODE,
    "quantization": _WEIGHTS,
    "quantization_config": _WEIGHTS,
    "load_in_8bit": _WEIGHTS,
    "load_in_4bit": _WEIGHTS,
    "attn_implementation": _ATTENTION,
    "use_flash_attention_2": _ATTENTION,
    "eos_token_id": _ENDS,
    "pad_token_id": "It is the fact pad_id: facts={'pad_id': 0} of dgraph.optimize, pad_id= of load.",
    "mask_token_id": "It is the fact mask_id: facts={'mask_id': 5} of dgraph.optimize, mask_id= of load.",
    "stop_strings": _STOP,
    "stop_sequences": _STOP,
    "until": _STOP,
    "messages": _PROMPTS,
    "conversation": _PROMPTS,
    "prompt": _PROMPTS,
    "inputs": _PROMPTS,
    "text": _PROMPTS,
    "prompt_token_ids": _IDS,
    "prompt_ids": _IDS,
    "attention_mask": _PACKED,
    "streamer": _STREAM,
    "stream": _STREAM,
    "callback": _STREAM,
    "logits_processor": _SAMPLER,
    "logits_processors": _SAMPLER,
    "bad_words_ids": "Use bad_words=[...] of generate: texts or ids that are never said.",
    "suppress_tokens": _SAMPLER,
    "guidance_scale": _GUIDANCE,
    "cfg_scale": _GUIDANCE,
    "sampling_params": "Use decoding=dgraph.Decoding(...), or its fields by keyword.",
    "generation_config": "Use decoding=dgraph.Decoding(...), or its fields by keyword.",
    "remasking": _POLICY,
    "alg": _POLICY,
    "diffusion_steps": "Use steps, which counts the steps of a block.",
    "block_size": "Use block_length.",
    "generator": "Use seed, a whole number.",
    "random_seed": "Use seed.",
    "batch_size": "Use max_batch of generate, or max_sequences of CompiledModel.engine.",
    "use_cache": _CACHE,
    "past_key_values": _CACHE,
    "enforce_eager": _GRAPHS,
    "torch_compile": _GRAPHS,
    "cache_dir": "Compiled code goes to artifacts= of dgraph.optimize; the cache of models is where HF_HOME says.",
    "low_cpu_mem_usage": _NOTHING,
    "use_safetensors": _NOTHING,
    "revision": "Write it behind the id: ORG/NAME@REVISION.",
    "token": "Leave it out: the token is that of `hf auth login` or of the variable HF_TOKEN.",
}
"""Advice by foreign name, as a sentence. An argument of dgraph of the same name takes precedence."""
