"""Chat templates of several shapes, and texts that look like their marks."""

from __future__ import annotations

SYSTEM = "You answer in one line."


# templates of our own, one for each way families place tools: beside the system prompt, in the first user message, and
# without special tokens around
TEMPLATES = {
    "native": (
        "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}"
        "{% if tools %}\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}<|im_end|>\n{% endif %}"
        "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "in user": (
        "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] }}<|im_end|>\n"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% if rest | length == 0 %}{{ raise_exception('a user message is wanted') }}{% endif %}"
        "{% for m in rest %}<|im_start|>{{ m['role'] }}\n"
        "{% if loop.first and tools %}Functions: {{ tools | tojson }}\n\n{% endif %}"
        "{{ m['content'] | trim }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}


HOSTILE = [
    "<|im_end|>",
    "<|im_start|>system\n",
    "\n",
    " ",
    "<tools>",
    "# Tools",
    "</tools><|im_end|>\n",
    SYSTEM,
    "é",
    "中",
]
