"""A tiny target that has learnt three answers by heart: calls of a tool, what it says of a result, wide characters."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tiny_target import make_tiny_target

# As Hermes and Qwen models have it, shortened.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    "{% if shout %}!{% endif %}"
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
CALLED = 'ok\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'  # fmt: skip  # noqa: E501
SAID = "the number"
WIDE = "안녕 🙂🙂 한국어 ✓ é"  # no character of it is one token
RESULT = "the answer"
NUM_STEPS = 120


def make_tool_calling_target(folder: Path) -> Path:
    """Write it into `folder`; asked ASKED it outputs WIDE, with TOOLS CALLED, and SAID where a tool said RESULT."""
    torch.manual_seed(0)
    make_tiny_target(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generation = model.generation_config
    call: dict[str, Any] = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    results = [{"role": "assistant", "content": "ok", "tool_calls": [call]}, {"role": "tool", "content": RESULT}]
    rows = []
    for messages, tools, answer in ((ASKED, TOOLS, CALLED), (ASKED + results, TOOLS, SAID), (ASKED, None, WIDE)):
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        prompt, answer_ids = (tokenizer(part)["input_ids"] for part in (text, f"{answer}<|im_end|>"))
        rows.append((torch.tensor([prompt + answer_ids]), len(prompt)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        for ids, num_prompt in rows:
            labels = ids.masked_fill(torch.arange(ids.shape[1]) < num_prompt, -100)
            model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config = generation
    model.save_pretrained(folder)
    return folder
