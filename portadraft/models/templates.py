"""Conversation templates for models whose tokenizer carries none.

A template here is a fallback: a template that the tokenizer brings is always used instead.
"""

from __future__ import annotations

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)

# Vicuna 1.1 and later: "<s>SYSTEM USER: … ASSISTANT: …</s>USER: … ASSISTANT:".
VICUNA = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}"
    "{%- set system = '" + VICUNA_SYSTEM.replace("'", "\\'") + "' -%}{%- set turns = messages -%}"
    "{%- endif -%}"
    "{{- bos_token ~ system ~ ' ' -}}"
    "{%- for message in turns -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('roles must alternate user, assistant, user, …') -}}"
    "{%- endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{- 'USER: ' ~ message['content'] ~ ' ' -}}"
    "{%- else -%}"
    "{{- 'ASSISTANT: ' ~ message['content'] ~ eos_token -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"
)


def fallback_template(name: str) -> str | None:
    """The conversation template of the model family that a name, id or folder names, or None.

    Only Vicuna (1.1 and later) has one here.
    """
    last = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()
    if "vicuna" in last and "delta" not in last:
        return VICUNA
    return None
