"""Training of drafters: prompts, answers with their features, the training-time test, checkpoints, export."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner, Result

import llmopt
from llmopt.errors import ConfigError, PluginOptionError, PluginUnavailableError
from llmopt.testing import tiny_model, tiny_prompts, tiny_tokenizer
from llmopt_plugins.speculation.eagle.model import Eagle3Head
from llmopt_plugins.speculation.training.answers import (
    Conversation,
    FeatureRecorder,
    generate,
    loop_start,
    read_shard,
    save_shard,
)
from llmopt_plugins.speculation.training.break_even import BreakEven
from llmopt_plugins.speculation.training.checks import check_drafters
from llmopt_plugins.speculation.training.commands import train_drafter
from llmopt_plugins.speculation.training.corpus import Corpus
from llmopt_plugins.speculation.training.evaluation import judge
from llmopt_plugins.speculation.training.prompts import builtin_prompts, read_prompts
from llmopt_plugins.speculation.training.session import CannotPayError, Session, Settings
from llmopt_plugins.speculation.training.trainer import Recipe, Trainer
from llmopt_plugins.speculation.training.tune import Candidate, TuneOptions, known_drafters, recommend, write_setting
from llmopt_plugins.speculation.training.tune import run as tune_run
from llmopt_plugins.speculation.training.unroll import HeadLoss, unroll, unrolled_loss
from llmopt_plugins.speculation.training.warm_start import choose_vocabulary, default_taps, new_head


# -- prompts ----------------------------------------------------------------------------------------------------------
def test_built_in_prompts_are_judged_on_topics_that_training_never_sees() -> None:
    found = builtin_prompts(10_000)
    training = {prompt[0]["content"] for prompt in found.training}  # type: ignore[index]
    held_out = {prompt[0]["content"] for prompt in found.held_out}  # type: ignore[index]
    assert len(training) > 4000
    assert len(held_out) > 500
    assert not any("metamorphosis" in text or "garage sale" in text for text in training)
    assert not training & held_out
    assert not any("{}" in text for text in training | held_out)


def test_built_in_prompts_are_the_same_for_a_seed() -> None:
    assert builtin_prompts(50, seed=3) == builtin_prompts(50, seed=3)
    assert builtin_prompts(50, seed=3).training != builtin_prompts(50, seed=4).training


def test_prompts_of_a_file_are_questions_texts_or_messages(tmp_path: Path) -> None:
    lines = tmp_path / "questions.txt"
    lines.write_text("\n".join(f"Question {i}?\\nPlease." for i in range(40)))
    found = read_prompts(lines)
    assert len(found.training) + len(found.held_out) == 40
    assert len(found.held_out) >= 4
    assert "\n" in found.training[0][0]["content"]  # type: ignore[index]
    objects = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    objects.write_text("\n".join(json.dumps(v) for v in [*(["raw"] * 18), chat, {"messages": chat}, {"prompt": "p"}]))
    found = read_prompts(objects)
    assert chat in found.training + found.held_out
    assert "p" in found.training + found.held_out


def test_a_file_that_holds_no_prompts_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(['"fine"'] * 20 + ['{"question": "?"}']))
    with pytest.raises(ConfigError, match=r":21 is neither a text nor chat messages"):
        read_prompts(path)
    path.write_text('"one"\n')
    with pytest.raises(ConfigError, match="has 1 prompts"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")


# -- answers ----------------------------------------------------------------------------------------------------------
def test_a_loop_is_found_where_it_begins() -> None:
    text = list(range(100))
    assert loop_start(text) == 100
    assert loop_start(text + [7, 8, 9, 5] * 20) in range(98, 108)
    assert loop_start([1, 2] * 3) == 6  # too short to be called one


def test_recorded_features_are_the_hidden_states_of_the_model(tmp_path: Path) -> None:
    model = tiny_model()
    recorder = FeatureRecorder([0, 1, 2])
    prompts: Any = tiny_prompts(5, min_length=3)
    with llmopt.build(model, [recorder], max_num_requests=3) as pipe:
        paths = generate(pipe, recorder, prompts, tmp_path, max_new_tokens=20, shard_size=4, sampled=())
        times = [path.stat().st_mtime_ns for path in paths]
        again = generate(pipe, recorder, prompts, tmp_path, max_new_tokens=20, shard_size=4, sampled=())
    assert len(paths) == 2
    assert [path.stat().st_mtime_ns for path in again] == times  # what is there is kept
    found = [c for path in paths for c in read_shard(path)]
    assert [c.num_prompt for c in found] == [len(prompt) for prompt in prompts]
    for conversation in found:
        states = model(conversation.ids[None], output_hidden_states=True).hidden_states
        count = conversation.num_prompt + conversation.num_answer - 1
        torch.testing.assert_close(conversation.taps[:count, 1].float(), states[1][0, :count], atol=0.02, rtol=0.02)
        torch.testing.assert_close(conversation.last[:count].float(), states[2][0, :count], atol=0.03, rtol=0.02)


# -- the training-time test -------------------------------------------------------------------------------------------
def some_corpus(folder: Path, model: Any, lengths: tuple[int, ...] = (12, 9, 15), num_prompt: int = 4) -> Corpus:
    """Random conversations with true hidden states."""
    chance = torch.Generator().manual_seed(0)
    made = []
    for length in lengths:
        ids = torch.randint(3, 60, (length,), generator=chance)
        states = model(ids[None], output_hidden_states=True).hidden_states
        taps = torch.stack([states[i][0] for i in (0, 1, 1)], dim=1)
        made.append(Conversation(ids, num_prompt, taps.bfloat16().detach(), states[-1][0].bfloat16().detach()))
    save_shard(folder / "shard.safetensors", made)
    return Corpus([folder / "shard.safetensors"])


def some_head(model: Any) -> Eagle3Head:
    return new_head(model, torch.arange(64))


def test_an_unrolled_level_is_what_drafting_step_by_step_computes(tmp_path: Path) -> None:
    model = tiny_model()
    head = some_head(model)
    embedding = model.get_input_embeddings().weight.detach().float()
    batch = next(some_corpus(tmp_path, model).batches(1000))
    levels = list(unroll(head, embedding, batch, 3))
    row, place = 1, 5
    ids = batch.ids[row]
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        k, v = torch.cat(keys, dim=1).transpose(1, 2), torch.cat(values, dim=1).transpose(1, 2)
        is_prompt = len(keys) == 1
        seen = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=is_prompt, enable_gqa=True)
        return seen.transpose(1, 2)

    count = place + 1
    positions = torch.arange(count)[None]
    taps = batch.taps[row : row + 1, :count].float()
    output = head(embedding[ids[1 : count + 1]][None], head.fuse(taps), positions, attend)[:, -1:]
    torch.testing.assert_close(levels[0][row, place], output[0, 0], atol=1e-4, rtol=1e-4)
    for level in (1, 2):
        token = embedding[ids[place + 1 + level]][None, None]
        output = head(token, head.feedback(output), torch.tensor([[place + level]]), attend)
        torch.testing.assert_close(levels[level][row, place], output[0, 0], atol=1e-4, rtol=1e-4)


def test_the_loss_and_its_gradient_are_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    states = torch.randn(300, 16, requires_grad=True)
    weight, rows = torch.randn(40, 16), torch.randint(0, 50, (300,))
    probabilities = torch.randn(50, 40).softmax(-1)
    said = torch.randint(0, 40, (300,))
    loss, hits = HeadLoss.apply(states, weight, probabilities, rows, said)
    (3 * loss).backward()
    mine = states.grad
    again = states.detach().clone().requires_grad_()
    logits = again @ weight.T
    expected = functional.cross_entropy(logits, probabilities[rows], reduction="sum")
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(mine, again.grad)
    assert int(hits) == int((logits.argmax(-1) == said).sum())


def test_only_tokens_of_answers_are_asked_for(tmp_path: Path) -> None:
    batch = next(some_corpus(tmp_path, tiny_model(), lengths=(12, 9)).batches(1000))
    for level in range(3):
        for row, feature in batch.asks(level).nonzero().tolist():
            assert 4 <= feature + 2 + level < int(batch.num_tokens[row])
    assert batch.asks(0).sum() == (12 - 4) + (9 - 4)


def test_frozen_rows_stay_and_the_target_is_not_touched(tmp_path: Path) -> None:
    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    corpus = some_corpus(tmp_path, model)
    trainer = eagle_trainer(model, tmp_path / "state.pt", max_epochs=3)
    trainer.run(lambda: corpus)
    assert torch.equal(trainer.head.lm_head.weight, model.get_output_embeddings().weight[:64])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def eagle_trainer(model: Any, checkpoint: Path, max_epochs: int, budget_s: float = 1e6) -> Trainer[Eagle3Head]:
    embedding = model.get_input_embeddings().weight.detach().float()
    recipe = Recipe(budget_s=budget_s, max_epochs=max_epochs, warm_up=0.0, tokens_per_batch=32)
    return Trainer(some_head(model), lambda h, b: unrolled_loss(h, embedding, b, 2), recipe, checkpoint)


def test_a_run_that_was_cut_short_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    model = tiny_model()
    corpus = some_corpus(tmp_path, model)
    first = eagle_trainer(model, tmp_path / "state.pt", max_epochs=2)
    first.run(lambda: corpus)
    second = eagle_trainer(model, tmp_path / "state.pt", max_epochs=4)
    assert second.progress == first.progress
    assert all(torch.equal(a, b) for a, b in zip(first.mean.parameters(), second.mean.parameters(), strict=True))
    second.run(lambda: corpus)
    assert second.progress.epoch == 4
    assert second.progress.step == 2 * first.progress.step


def test_a_checkpoint_of_another_head_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    path = tmp_path / "state.pt"
    eagle_trainer(model, path, max_epochs=1).save()
    data = torch.load(path, weights_only=True)
    data["head"].pop("fc.weight")
    torch.save(data, path)
    with pytest.raises(ConfigError, match="of another head or damaged"):
        eagle_trainer(model, path, max_epochs=1)


def test_the_time_budget_ends_training(tmp_path: Path) -> None:
    model = tiny_model()
    corpus = some_corpus(tmp_path, model)
    trainer = eagle_trainer(model, tmp_path / "state.pt", max_epochs=100_000, budget_s=0.5)
    assert 0.5 <= trainer.run(lambda: corpus).seconds < 5


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_the_ends() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0, 3])
    chosen, share = choose_vocabulary(counts, 4, always=[5])
    assert chosen.tolist() == [0, 2, 4, 5]
    assert share == pytest.approx(21 / 25)


# -- whether it pays --------------------------------------------------------------------------------------------------
def test_break_even_follows_from_the_costs() -> None:
    free = BreakEven(verify_s=(1.0,) * 9, draft_s=0.0)
    assert free.best(0.5)[0] == pytest.approx(sum(0.5**i for i in range(9)), rel=1e-3)
    assert free.needed() == 0.01
    dear = BreakEven(verify_s=tuple(1.0 + k for k in range(9)), draft_s=0.2)
    assert dear.needed() is None
    assert dear.best(0.9) == (1.0, 0)
    assert "no acceptance pays" in dear.report()


def test_training_that_cannot_pay_is_refused_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llmopt_plugins.speculation.training.break_even.measure",
        lambda *args, **kwargs: BreakEven(tuple(1.0 + k for k in range(13)), 0.1),
    )
    with pytest.raises(CannotPayError, match="1.00x in the best case"):
        session(tmp_path, prompts_file(tmp_path)).run(tmp_path / "out")
    assert not (tmp_path / "work" / "answers").exists()


# -- all of it --------------------------------------------------------------------------------------------------------
def prompts_file(folder: Path, count: int = 60) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(f"number {i} of some, and {i * 7}") for i in range(count)))
    return path


def session(folder: Path, prompts: Path, **changes: Any) -> Session:
    values = {
        "model": "tiny",
        "prompts": str(prompts),
        "budget_minutes": 10.0,
        "draft_vocab_size": 200,
        "depth": 2,
        "max_new_tokens": 24,
        "max_epochs": 6,
        "executor": "",
    }
    model = tiny_model(num_hidden_layers=4)
    return Session(Settings(**(values | changes)), folder / "work", model, tiny_tokenizer())


@pytest.mark.parametrize("algorithm", ["eagle3", "medusa"])
def test_a_training_learns_and_is_exported_in_the_published_layout(tmp_path: Path, algorithm: str) -> None:
    outcome = session(tmp_path, prompts_file(tmp_path), algorithm=algorithm).run(tmp_path / "out", force=True)
    assert outcome.history[-1] < outcome.history[0]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(config["llmopt"]["target_mark"]) == 32
    if algorithm == "medusa":
        assert set(load_file(tmp_path / "out" / "medusa_lm_head.safetensors")) == {
            f"{head}.0.linear.{name}" for head in (0, 1) for name in ("weight", "bias")
        }
        return
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors  # the target's rows
    assert tensors["d2t"].dtype == torch.int64
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == 200
    assert tensors["t2d"].sum() == 200
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_an_exported_head_computes_what_the_trained_one_did(tmp_path: Path) -> None:
    run = session(tmp_path, prompts_file(tmp_path))
    outcome = run.run(tmp_path / "out", force=True)
    model = run.model
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(200)
    head = new_head(model, ids)
    missing, unknown = head.load_state_dict(
        {n: v.float() if v.is_floating_point() else v for n, v in tensors.items()}, strict=False
    )
    assert missing == ["lm_head.weight"]
    assert not unknown
    held_out = Corpus(sorted((tmp_path / "work" / "held_out").glob("*.safetensors")))
    embedding = model.get_input_embeddings().weight.detach().float()
    again = judge(head, embedding, held_out.batches(2048))
    assert again.reached == pytest.approx(outcome.score["reached"], abs=0.03)


def test_a_second_run_keeps_answers_and_goes_on(tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path)
    session(tmp_path, prompts, max_epochs=1).run(tmp_path / "out", force=True)
    shards = sorted((tmp_path / "work" / "answers").glob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in shards]
    outcome = session(tmp_path, prompts, max_epochs=2).run(tmp_path / "out", force=True)
    assert [path.stat().st_mtime_ns for path in shards] == times
    assert outcome.progress.epoch == 2


def test_a_work_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path)
    session(tmp_path, prompts, max_epochs=1).run(tmp_path / "out", force=True)
    with pytest.raises(ConfigError, match="with other settings: draft_vocab_size was 200, is 100; depth was 2, is 1"):
        session(tmp_path, prompts, draft_vocab_size=100, depth=1)


def train(folder: Path, *options: str) -> Result:
    app = typer.Typer()
    app.command()(train_drafter)
    return CliRunner().invoke(app, ["tiny", "--work-folder", str(folder / "work"), *options])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prompts", "typo.txt", "cannot be read"),
        ("--executor", "nativ", "--executor 'nativ': no plugin is called 'nativ'"),
        ("--executor", "native:speed=3", "has no option 'speed'"),
        ("--out", "prompts.jsonl", "is a folder to write into, and there is a file"),
        ("--out", "prompts.jsonl/drafter", "cannot be made"),
        ("--work-folder", "prompts.jsonl", "--work-folder .* is a folder"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_loaded_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, message: str
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llmopt_plugins.speculation.training.run_training.load", load)
    good = prompts_file(tmp_path)
    result = train(tmp_path, "--prompts", str(good), option, value)
    assert isinstance(result.exception, ConfigError)
    assert re.search(message, str(result.exception))
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_a_session_with_a_wrong_setting_leaves_nothing_that_refuses_the_right_one(tmp_path: Path) -> None:
    good = prompts_file(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        session(tmp_path, tmp_path / "typo.txt").run(tmp_path / "out")
    with pytest.raises(ConfigError, match="no plugin is called 'nativ'"):
        session(tmp_path, good, executor="nativ").run(tmp_path / "out")
    with pytest.raises(ConfigError, match="there is a file"):
        session(tmp_path, good).run(good)
    assert not (tmp_path / "work").exists()
    session(tmp_path, good)


@pytest.mark.model
@pytest.mark.slow
def test_eight_thousand_tokens_teach_a_head_for_the_demo_model_something(tmp_path: Path) -> None:
    model, tokenizer = llmopt.load("demo", dtype="bfloat16")
    settings = Settings(
        model="demo", budget_minutes=240.0, depth=2, max_prompts=88, num_held_out=8, max_new_tokens=96, max_epochs=2
    )
    outcome = Session(settings, tmp_path / "work", model, tokenizer).run(tmp_path / "out", force=True)
    assert default_taps(30) == (2, 15, 27)
    assert outcome.history[-1] < 0.9 * outcome.history[0]
    assert outcome.score["reached"][0] > 0.02


# -- tuning -----------------------------------------------------------------------------------------------------------
def test_the_fastest_drafter_is_recommended_only_where_it_gains(tmp_path: Path) -> None:
    off, small, large = Candidate("off", [100.0]), Candidate("ngram", [102.0]), Candidate("eagle", [130.0])
    refused = Candidate("medusa", refused="it has no heads")
    assert recommend([off, small, refused]) is off
    assert recommend([off, small, large, refused]) is large
    write_setting(tmp_path / "s.json", large, [off, small, large, refused], ["native"], TuneOptions(1, 8, 1, 1))
    found = json.loads((tmp_path / "s.json").read_text())
    assert found["plugins"] == ["native", "eagle"]
    assert found["measured"]["eagle"]["speedup"] == 1.3
    assert found["measured"]["medusa"] == {"refused": "it has no heads"}


def tune(monkeypatch: pytest.MonkeyPatch, out: Path, candidates: list[str], *, loads: bool = True) -> None:
    """The command's work with a tiny model."""

    def load(*args: Any, **kwargs: Any) -> Any:
        assert loads, "the model was loaded"
        return tiny_model(), tiny_tokenizer()

    monkeypatch.setattr("llmopt_plugins.speculation.training.tune.load", load)
    prompts, listed = prompts_file(out.parent, count=20), out.parent / "listed.json"
    listed.write_text('{"plugins": ["paged_kv"]}')
    options = TuneOptions(num_prompts=1, max_new_tokens=8, batch_size=1, rounds=1)
    tune_run("tiny", str(prompts), candidates, [f"@{listed}"], options, out, dtype="auto", device_map=None)


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("ngrams", "--candidate 'ngrams': no plugin is called 'ngrams'"),
        ("ngram:speed=3", "plugin 'ngram' has no option 'speed'"),
        ("eagle:width=0", "plugin 'eagle' refuses its options"),
        ("ngram:", "nothing follows the colon"),
        ("@listed.json", "'@listed.json' is not a plugin name"),
        ("prefix_cache", "is no drafter: a plugin of the layer memory"),
        ("native", "is no drafter"),
    ],
)
def test_a_candidate_that_cannot_be_a_drafter_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, candidate: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(monkeypatch, tmp_path / "s.json", ["ngram", candidate], loads=False)
    assert not (tmp_path / "s.json").exists()


def test_a_setting_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.json").mkdir()
    with pytest.raises(ConfigError, match="is a file to write, and there is a folder"):
        tune(monkeypatch, tmp_path / "s.json", ["ngram"], loads=False)


@pytest.mark.parametrize("name", known_drafters())
def test_each_built_in_drafter_is_known_as_one(name: str) -> None:
    assert check_drafters([name, f"{name} "], "--candidate") == [name]


def test_a_candidate_that_fails_for_the_model_is_a_row_and_one_named_twice_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s.json"
    missing = f"eagle:head='{tmp_path / 'missing'}'"
    tune(monkeypatch, out, ["ngram:num_draft=2", missing, "ngram:num_draft = 2"])
    setting = json.loads(out.read_text())
    found = setting["measured"]
    assert setting["plugins"][0] == "paged_kv"
    assert list(found) == ["off", "ngram:num_draft=2", missing]
    assert found["ngram:num_draft=2"]["tokens_per_s"] > 0
    assert "eagle" in found[missing]["refused"]


def test_tuning_fails_where_no_candidate_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginUnavailableError, match=r"none of the drafters can run with this model:\n  eagle:head="):
        tune(monkeypatch, tmp_path / "s.json", [f"eagle:head='{tmp_path / 'missing'}'"])
    assert not (tmp_path / "s.json").exists()


def test_a_written_setting_is_a_list_of_plugins(tmp_path: Path) -> None:
    path = tmp_path / "speculation.json"
    write_setting(path, Candidate("off", [1.0]), [Candidate("off", [1.0])], ["paged_kv"], TuneOptions(1, 8, 1, 1))
    with llmopt.build(tiny_model(), plugins=[f"@{path}"]) as pipe:
        assert "paged_kv" in str(pipe.describe())
    path.write_text('{"plugins": 3}')
    with pytest.raises(PluginOptionError, match="must have a list of texts"):
        llmopt.build(tiny_model(), plugins=[f"@{path}"])
    with pytest.raises(PluginOptionError, match="tune-spec"):
        llmopt.build(tiny_model(), plugins=["@missing.json"])
