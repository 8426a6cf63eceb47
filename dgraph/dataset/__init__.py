"""Many prompts from a file: what its lines say, what was answered already, and how an engine stays full until the end.

A line of the input is one JSON object:

    {"prompt": "Sort these words: river stone"}
    {"id": "b", "messages": [{"role": "user", "content": "Sort: b a"}], "max_new_tokens": 64, "threshold": 0.8}

`prompt` is a text, framed by the model's chat template, or ids as they are; `messages` are a conversation. `id` is a
text or a whole number, the number of the line where there is none. All other fields are those of a `dgraph.Decoding`. A
line of the output has the id, and what came of it:

    {"id": "b", "text": "Sorted: a b", "tokens": 12, "finish_reason": "stop"}
    {"id": 7, "text": null, "tokens": 0, "finish_reason": "error", "error": "a prompt of 5000 tokens ..."}
"""

from __future__ import annotations
