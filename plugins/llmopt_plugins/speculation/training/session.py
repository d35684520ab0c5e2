"""One training from prompts to an exported drafter, in a work folder that a later run goes on from.

WORK/session.json         what was asked for; a run with other settings is refused
WORK/answers/*.safetensors  the target's answers and hidden states, in shards
WORK/held_out/...         the same for the prompts that are kept for judging
WORK/vocabulary.safetensors  which tokens the head can say
WORK/training.pt          the state of the training loop
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import llmopt
from llmopt.errors import ConfigError, LlmoptError
from llmopt.hf.capabilities import text_config
from llmopt_plugins.speculation.eagle.checkpoint import target_mark
from llmopt_plugins.speculation.training import break_even
from llmopt_plugins.speculation.training.answers import FeatureRecorder, generate
from llmopt_plugins.speculation.training.checks import check_folder, check_plugins
from llmopt_plugins.speculation.training.corpus import Corpus
from llmopt_plugins.speculation.training.evaluation import HeldOutScore, judge
from llmopt_plugins.speculation.training.export import export_eagle3, export_medusa
from llmopt_plugins.speculation.training.medusa import MedusaHeads, judge_medusa, medusa_loss
from llmopt_plugins.speculation.training.prompts import PromptSet, builtin_prompts, read_prompts
from llmopt_plugins.speculation.training.trainer import Progress, Recipe, Trainer
from llmopt_plugins.speculation.training.unroll import unrolled_loss
from llmopt_plugins.speculation.training.warm_start import choose_vocabulary, default_taps, new_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANSWER_SHARE = 0.4  # of the budget that generating may take
_MIN_BEST_CASE = 1.1


class CannotPayError(LlmoptError):
    """Even a drafter better than is to be expected would hardly speed this model up here."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a training is asked for."""

    model: str
    prompts: str = "builtin"  # or a file
    algorithm: Literal["eagle3", "medusa"] = "eagle3"
    budget_minutes: float = 60.0  # for answers and training together
    draft_vocab_size: int = 8192
    depth: int = 3  # levels of the training-time test; heads of Medusa
    max_prompts: int = 4000
    max_new_tokens: int = 256
    num_held_out: int = 200
    max_epochs: int = 12
    executor: str = "native"  # plugins that run the model, joined by blanks; "": the plain one
    seed: int = 0

    def read_prompts(self) -> PromptSet:
        """As many as are asked for.

        :raises ConfigError: the file cannot be read, or is not one of prompts.
        """
        if self.prompts == "builtin":
            found = builtin_prompts(self.max_prompts, self.seed)
        else:
            found = read_prompts(self.prompts, self.seed)
        return PromptSet(found.training[: self.max_prompts], found.held_out[: self.num_held_out])

    def check(self, out: Path, work: Path) -> PromptSet:
        """Find out what can be known before the model is loaded: a wrong setting must not cost hours, or leave traces.

        :raises ConfigError: no such prompts or plugins, or a folder that cannot be written into.
        """
        check_folder(out, "--out")
        check_folder(work, "--work-folder")
        check_plugins(self.executor.split(), "--executor")
        return self.read_prompts()


@dataclass(slots=True)
class Outcome:
    """What came of a training."""

    folder: Path
    score: dict[str, Any]
    progress: Progress
    history: list[float]  # of the loss


@dataclass(slots=True)
class Reporter:
    """Where news goes; the command line puts bars there."""

    say: Callable[[str], None] = lambda text: None
    answers: Callable[[int, int, int], None] = lambda shards, all_shards, tokens: None
    training: Callable[[Progress, Recipe], None] = lambda progress, recipe: None


class Session:
    """A training in its work folder.

    :param model: of the target, with its tokenizer; used as it is.
    :raises ConfigError: the folder holds a training with other settings.
    """

    def __init__(
        self,
        settings: Settings,
        work: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        reporter: Reporter | None = None,
    ) -> None:
        self.settings, self.work, self.model, self.tokenizer = settings, work, model, tokenizer
        self.reporter = reporter or Reporter()
        self._config: Any = text_config(model)
        self._started = time.monotonic()
        self._check_session()

    def run(self, out: Path, *, force: bool = False) -> Outcome:
        """All of it; what the work folder has already is not done again.

        :param force: go on where the break-even says that it cannot pay.
        :raises ConfigError: see `Settings.check`; then nothing is written.
        :raises CannotPayError: it cannot pay, and ``force`` is not set.
        """
        prompts = self.settings.check(out, self.work)
        self._write_session()
        keep_freed_memory()
        layers = [*default_taps(self._config.num_hidden_layers), self._config.num_hidden_layers]
        if not self._has_answers():
            self._generate(prompts, layers, force)
        corpus = Corpus(sorted((self.work / "answers").glob("*.safetensors")))
        held_out = list(Corpus(sorted((self.work / "held_out").glob("*.safetensors"))).batches(2048))
        vocabulary, coverage = self._vocabulary(corpus)
        self.reporter.say(f"draft vocabulary: {len(vocabulary)} tokens, {coverage:.1%} of the answers' text")
        left = max(1.0, 60 * self.settings.budget_minutes - (time.monotonic() - self._started))
        checkpoint = self.work / "training.pt"
        done = (
            Progress(**torch.load(checkpoint, weights_only=True)["progress"]).seconds if checkpoint.is_file() else 0.0
        )
        recipe = Recipe(budget_s=done + left, depth=self.settings.depth, max_epochs=self.settings.max_epochs)
        embedding = self.model.get_input_embeddings().weight.detach().float().cpu()
        provenance = {
            "target": str(getattr(self.model.config, "name_or_path", "")) if "/" not in self.settings.model else "",
            "target_mark": target_mark(self.model),
            "algorithm": self.settings.algorithm,
            "prompts": "builtin" if self.settings.prompts == "builtin" else "a file of the user",
            "draft_vocabulary_coverage": round(coverage, 4),
            "recipe": {**asdict(recipe), "seed": self.settings.seed},
        }
        provenance["target"] = Path(str(provenance["target"]) or self.settings.model).name
        score: dict[str, Any]
        if self.settings.algorithm == "eagle3":
            head = new_head(self.model, vocabulary, seed=self.settings.seed)
            trainer = Trainer(
                head, lambda h, b: unrolled_loss(h, embedding, b, recipe.depth, recipe.level_decay), recipe, checkpoint
            )
            progress = trainer.run(lambda: corpus, lambda p: self.reporter.training(p, recipe))
            found: HeldOutScore = judge(trainer.mean, embedding, held_out)
            score = {"reached": [round(p, 4) for p in found.reached], "num_tokens": found.num_tokens}
            export_eagle3(trainer.mean, out, {**provenance, "steps": progress.step, "held_out": score})
            history = trainer.history
        else:
            output: Any = self.model.get_output_embeddings()
            heads = MedusaHeads(recipe.depth, output.weight[vocabulary].cpu(), vocabulary, self._config.vocab_size)
            other = Trainer(heads, lambda h, b: medusa_loss(h, b, recipe.level_decay), recipe, checkpoint)
            progress = other.run(lambda: corpus, lambda p: self.reporter.training(p, recipe))
            score = {"reached": [round(p, 4) for p in judge_medusa(other.mean, held_out)]}
            export_medusa(other.mean, out, {**provenance, "steps": progress.step, "held_out": score})
            history = other.history
        return Outcome(out, score, progress, history)

    # -- parts --------------------------------------------------------------------------------------------------------
    def _fixed(self) -> dict[str, Any]:
        """The settings that a later run must share."""
        free = ("budget_minutes", "max_epochs", "executor")
        return {name: value for name, value in asdict(self.settings).items() if name not in free}

    def _check_session(self) -> None:
        path, wanted = self.work / "session.json", self._fixed()
        if not path.is_file():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        other = [
            f"{name} was {found.get(name)!r}, is {wanted[name]!r}" for name in wanted if found.get(name) != wanted[name]
        ]
        if other:
            raise ConfigError(
                f"{self.work} holds a training with other settings: {'; '.join(other)}. Choose another --work-folder, "
                "or remove it."
            )

    def _write_session(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "session.json").write_text(json.dumps(self._fixed(), indent=2) + "\n", encoding="utf-8")

    def _has_answers(self) -> bool:
        return (self.work / "answers" / "complete").is_file()

    def _generate(self, prompts: PromptSet, layers: list[int], force: bool) -> None:
        settings, say = self.settings, self.reporter.say
        recorder = FeatureRecorder(layers)
        longest = min(1024, self._config.max_position_embeddings)
        with llmopt.build(
            self.model,
            [*settings.executor.split(), recorder, break_even.CostProbe()],
            tokenizer=self.tokenizer,
            max_num_requests=32,
            max_model_len=longest,
        ) as pipe:
            pipe.check_supported()
            even = break_even.measure(pipe, *self._bytes(), one_level=settings.algorithm == "medusa")
            say(even.report())
            if even.best_case < _MIN_BEST_CASE and not force:
                raise CannotPayError(
                    f"a drafter cannot pay here: {even.best_case:.2f}x in the best case. Use --force to train all the "
                    "same, for another machine or a larger model."
                )
            limit_s = self._started + _ANSWER_SHARE * 60 * settings.budget_minutes
            # held-out prompts first: without them nothing can be judged
            size = max(8, min(128, len(prompts.training) // 8))
            generate(
                pipe, recorder, prompts.held_out, self.work / "held_out", max_new_tokens=settings.max_new_tokens,
                shard_size=size, seed=10_000_000, sampled=(),
            )  # fmt: skip
            num_shards = -(-len(prompts.training) // size)
            generate(
                pipe, recorder, prompts.training, self.work / "answers", max_new_tokens=settings.max_new_tokens,
                shard_size=size, seed=settings.seed, is_time_over=lambda: time.monotonic() > limit_s,
                show=lambda shards, tokens: self.reporter.answers(shards, num_shards, tokens),
            )  # fmt: skip
        (self.work / "answers" / "complete").touch()

    def _bytes(self) -> tuple[int, int]:
        """Weights that a draft level and a step of the target read."""
        size = self._config.hidden_size
        layer = sum(p.numel() for p in self.model.get_decoder().layers[-1].parameters())
        rows = min(self.settings.draft_vocab_size, self._config.vocab_size)
        target = sum(p.numel() for p in self.model.get_decoder().layers.parameters()) + self._config.vocab_size * size
        draft = layer + 2 * size * size + rows * size
        if self.settings.algorithm == "medusa":
            draft = self.settings.depth * (size * size + self._config.vocab_size * size)
        return draft, target

    def _vocabulary(self, corpus: Corpus) -> tuple[Tensor, float]:
        path = self.work / "vocabulary.safetensors"
        if not path.is_file():
            ends = self.model.generation_config.eos_token_id
            always = ends if isinstance(ends, list) else [] if ends is None else [ends]
            counts = corpus.count_answers(self._config.vocab_size)
            chosen, share = choose_vocabulary(counts, min(self.settings.draft_vocab_size, len(counts)), always)
            save_file({"ids": chosen, "coverage": torch.tensor([share])}, path)
        found = load_file(path)
        return found["ids"], float(found["coverage"])


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed: training frees and asks for the same tensors in every step.

    Without this a third of a step goes into page faults. Other C libraries are left alone.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for large pieces
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    mallopt(-2, 64 * 2**20)  # M_TOP_PAD
