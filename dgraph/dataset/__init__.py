"""Batch generation from a file: parse its lines, skip what is answered already, keep the engine full until the end.

A line of the input is one JSON object:

    {"prompt": "Sort these words: river stone"}
    {"id": "b", "messages": [{"role": "user", "content": "Sort: b a"}], "max_new_tokens": 64, "threshold": 0.8}

`prompt` is a text, framed by the model's chat template, or ids as they are; `messages` are a conversation. `id` is a
text or a whole number; a line without it gets its line number. All other fields are those of a `dgraph.Decoding`. A
line of the output has the id and the result:

    {"id": "b", "text": "Sorted: a b", "tokens": 12, "finish_reason": "stop"}
    {"id": 7, "text": null, "tokens": 0, "finish_reason": "error", "error": "a prompt of 5000 tokens ..."}
"""

from __future__ import annotations
