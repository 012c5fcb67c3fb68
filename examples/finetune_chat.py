"""Fine-tune a tiny GPT on conversations: chat template, loss mask, packs.

1. Write conversations as JSONL and convert them to token ids with a loss mask, as does
   ``shard_tools convert chat.jsonl chat/ --tokenizer bytes --messages-field messages --chat-template chat.jinja``.
2. Pack them into rows of 128 tokens. Only what the assistant says has labels (``mask_field="mask"``).
3. Train until the loss on the answers has fallen. What the user says carries no loss.

Run: ``python examples/finetune_chat.py``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from pretrain_gpt import GPT, train_step

from shard_tools.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, Packed, StreamingDataset

LENGTH, BATCH, EPOCHS, NUM_CHATS = 128, 8, 2, 300
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages -%}
{{ message.role[0] }}: {% if message.role == "assistant" %}{% generation %}{{ message.content }}{{ eos_token }}\
{% endgeneration %}{% else %}{{ message.content }}{% endif %}

{% endfor %}
{%- if add_generation_prompt %}a: {% endif -%}
"""


def conversations() -> list[list[dict[str, str]]]:
    """Give questions with their answers, two in each conversation."""
    return [
        [
            {"role": "user", "content": f"{number % 10} and {number // 10 % 10}?"},
            {"role": "assistant", "content": f"{number % 10 + number // 10 % 10} in all."},
            {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "You are welcome."},
        ]
        for number in range(NUM_CHATS)
    ]


def main(folder: Path) -> None:
    """Write the set, train, and show that the loss on the answers falls."""
    (folder / "chat.jinja").write_text(TEMPLATE)
    lines = [json.dumps({"messages": chat}) + "\n" for chat in conversations()]
    (folder / "chat.jsonl").write_text("".join(lines))
    options = TokenizeOptions(
        tokenizer="bytes", messages_field="messages", chat_template=str(folder / "chat.jinja"), split=("val=10%",)
    )
    report = tokenize(str(folder / "chat.jsonl"), str(folder / "chat"), options=options)
    for one in report.sets:
        print(f"{one.name}: {one.num_documents} conversations, {one.num_tokens:,} tokens")

    torch.manual_seed(0)
    model = GPT(report.vocab_size, length=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    packs = Packed(StreamingDataset(folder / "chat" / "train"), length=LENGTH, mask_field="mask", shift_labels=True)
    answers = 0
    losses = []
    with DataLoader(packs, batch_size=BATCH) as loader:
        for _ in range(EPOCHS):
            for batch in loader:
                answers += int((batch["labels"] != -100).sum())
                losses.append(train_step(model, optimizer, batch))
    print(f"loss on the answers: {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps, {answers:,} labels")
    if losses[-1] > losses[0] / 2:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="finetune-chat-") as made:
        main(Path(made))
