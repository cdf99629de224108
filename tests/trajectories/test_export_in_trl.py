"""TRL reads our export and computes, on its first step, the loss that our Learner computes on the same Trajectories."""

import json
from pathlib import Path

import pytest
import torch

from envs.renderer import load_renderer
from envs.transcript import render_transcript
from learners.config import LearnerConfig, LossConfig, LossKind
from learners.learner import Learner
from learners.models import CHAT_TEMPLATE, make_tiny_model
from learners.plan import SizedSample, plan_samples
from tests.trajectories.records import trajectory, turn
from trajectories.export import export_conversations
from trajectories.samples import conversation_sample
from trajectories.schema import Trajectory
from trajectories.store import StoreWriter

MARKED_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>",
    "<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}",
)
TRAJECTORIES = [
    trajectory(turn(reply="ls", observation="a.txt"), turn(reply="cat a.txt", observation=""), member=0),
    trajectory(turn(reply="echo lemon > melon.txt"), member=1),
    trajectory(turn(reply="rm a.txt"), member=2, reward=0.0),
]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_trl_trains_on_the_export_with_our_loss(tmp_path: Path) -> None:
    from datasets import load_dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    torch.set_num_threads(1)
    model = make_tiny_model(tmp_path / "model", ["ls cat a.txt echo lemon melon.txt"] * 10)
    (model / "chat_template.jinja").write_text(MARKED_TEMPLATE)
    counts = export_conversations(TRAJECTORIES, tmp_path / "export.jsonl")
    assert counts.written == 2
    rows = load_dataset("json", data_files=str(tmp_path / "export.jsonl"), split="train", cache_dir=str(tmp_path))
    trainer = SFTTrainer(
        model=str(model),
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=1,
            per_device_train_batch_size=2,
            assistant_only_loss=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]  # a Dataset, for a split was named
    )
    trainer.train()
    (their_loss,) = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert their_loss == pytest.approx(our_loss(model, tmp_path / "store", TRAJECTORIES[:2]), rel=1e-3)


def our_loss(model: Path, store: Path, trajectories: list[Trajectory]) -> float:
    renderer = load_renderer(model)
    sized: list[SizedSample] = []
    with StoreWriter(store, "test") as writer:
        for each in trajectories:
            sample = conversation_sample(*render_transcript(renderer, each.messages()))
            location = writer.append_sample(sample)
            num_trained = int(sample.mask.sum())
            sized.append(SizedSample(location=location, num_tokens=len(sample.ids), num_trained=num_trained))
    plan = plan_samples(sized, num_ranks=1, max_tokens=512)
    learner = Learner(LearnerConfig(), model=model)
    return learner.forward_backward(plan.ranks[0], LossConfig(kind=LossKind.CROSS_ENTROPY), store)["train/loss"]


def test_the_sharegpt_export_is_what_llama_factory_documents(tmp_path: Path) -> None:
    # data/README.md of LLaMA-Factory, formatting "sharegpt": a column `conversations` of {"from", "value"}; human (or
    # observation) in odd places, gpt (or function_call) in even ones, both text; the last one is gpt's.
    from trajectories.export import ConversationFormat

    export_conversations(TRAJECTORIES, tmp_path / "export.jsonl", format=ConversationFormat.SHAREGPT)
    rows = [json.loads(line) for line in (tmp_path / "export.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        said = row["conversations"]
        assert [set(message) for message in said] == [{"from", "value"}] * len(said)
        assert [message["from"] for message in said] == ["human", "gpt"] * (len(said) // 2)
        assert all(isinstance(message["value"], str) for message in said)
        assert "messages" not in row and "system" not in row
