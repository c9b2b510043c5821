"""The whole way from a target to a draft of its own architecture; every stage resumes.

The folder of the draft is an ordinary checkpoint with ``distillation.json``, its provenance; ``training/`` in it holds
what a later call goes on from (token files, the target's outputs, optimizer state) and may be deleted.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridspec.decoding.loop import check_length
from hybridspec.drafts.distillation.corpus import Corpus, identity, prepare
from hybridspec.drafts.distillation.cut import check_kept, cut_model
from hybridspec.drafts.distillation.documents import text_files
from hybridspec.drafts.distillation.draft_folder import DraftFolder
from hybridspec.drafts.distillation.draft_training import train_draft
from hybridspec.drafts.distillation.held_out import measure
from hybridspec.drafts.distillation.layer_choice import choose_layers, default_count, layer_kinds
from hybridspec.drafts.distillation.provenance import Provenance, fingerprint
from hybridspec.drafts.distillation.settings import DistillationSettings, Progress
from hybridspec.drafts.distillation.target_outputs import make_outputs
from hybridspec.errors import HybridspecError, InputError, UnsupportedLayerError
from hybridspec.runtime.runner import TargetRunner


def distill(
    target: TargetRunner,
    corpus: Sequence[Path],
    out: Path,
    settings: DistillationSettings | None = None,
    held_out: Sequence[Path] = (),
    progress: Progress = lambda *_: None,
) -> dict:
    """Makes a draft of ``target`` in the folder ``out``, or goes on where an earlier call stopped.

    Args:
        target: loaded with :meth:`TargetRunner.from_pretrained`.
        corpus: text files, ``.gz`` files, JSON Lines, and folders of these.
        held_out: text to test on; without any, a part of the corpus is kept back.

    Returns:
        What ``distillation.json`` holds. ``complete`` is false if SIGINT ended the training early; what was trained is
        saved then, and the same call goes on.

    Raises:
        InputError: an option, the corpus or ``out`` is not usable; says what to do.
        UnsupportedLayerError: no draft can be cut of these layers.
        HybridspecError: the loss is no longer a number.
    """
    return _Distillation(target, corpus, out, settings or DistillationSettings(), held_out, progress).run()


class _Distillation:
    def __init__(
        self,
        target: TargetRunner,
        corpus: Sequence[Path],
        out: Path,
        settings: DistillationSettings,
        held_out: Sequence[Path],
        progress: Progress,
    ) -> None:
        self.target, self.settings, self.progress = target, settings, progress
        kinds = layer_kinds(target.model)
        if settings.keep_layers is not None:
            kept = check_kept(settings.keep_layers, len(kinds))
        else:
            kept = choose_layers(kinds, default_count(kinds) if settings.layers is None else settings.layers)
        self.draft = cut_model(target.model, kept).float()
        try:
            self.untrained = TargetRunner(self.draft, target.tokenizer, rollback=target.rollback)
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(
                f"a draft of layers {', '.join(map(str, kept))} cannot run by itself: {error} Or choose more "
                "--layers, or others with --keep-layers."
            ) from error
        files, tests = (text_files([Path(path) for path in paths]) for paths in (corpus, held_out))
        if not files:
            raise InputError("no corpus: give text files or folders of them")
        if settings.length > target.max_length:
            raise InputError(f"windows of {settings.length} tokens exceed the context of {target.max_length}")
        # Whatever the prompt, it has two tokens.
        check_length(target, [0, 0], settings.new_tokens, settings.k)
        known = {
            "target": fingerprint(target),
            "kept_layers": kept,
            "corpus": identity(files),
            "heldout": identity(tests),
            **settings.identity(),
        }
        self.folder = DraftFolder(out, known, target.path)
        self.corpus: Corpus = prepare(
            files,
            tests,
            target.tokenizer,
            target.vocab_size,
            self.folder.training / "tokens",
            settings.length,
            settings.minutes,
            lambda text, share: progress("corpus", share, text),
        )
        self.provenance = Provenance(target, self.draft, self.folder, settings, files, self.corpus)
        self.prompts = self.corpus.prompts(target.tokenizer, settings.prompts, longest=96)
        for source, prompt in self.prompts:
            try:
                check_length(target, prompt, settings.new_tokens, settings.k)
            except HybridspecError as error:
                raise type(error)(f"held-out prompt of {source}: {error}") from error
        # Not before: a corpus that was refused may be another the next time.
        self.folder.save_state()
        self.windows = self.corpus.held_out_windows(target.tokenizer, settings.length, count=16)

    def run(self) -> dict:
        out, rollback = self.folder.path, self.target.rollback
        self._measured("before", 0, lambda: self.untrained)
        make_outputs(self.target, self.corpus, self.folder, self.settings, self.progress)
        run = train_draft(self.target, self.draft, self.corpus, self.folder, self.settings, self.progress)
        self.draft.save_pretrained(out)
        self.target.tokenizer.save_pretrained(out)
        provenance = self.provenance.write(run, None)
        if run.stop_asked:
            return provenance
        after = self._measured("after", run.step, lambda: TargetRunner.from_pretrained(out, rollback=rollback))
        return self.provenance.write(run, after)

    def _measured(self, name: str, steps: int, load: Callable[[], TargetRunner]) -> dict:
        """Held-out figures of the draft after ``steps``, measured now or by an earlier call."""
        settings, stored = self.settings, self.folder.state.held_out
        key = [steps, settings.k, settings.prompts, settings.new_tokens]
        if stored.get(name, {}).get("key") != key:
            stage = f"held-out text, {name}"
            figures = measure(
                self.target,
                load(),
                self.prompts,
                self.windows,
                settings.k,
                settings.new_tokens,
                lambda text, share: self.progress(stage, share, text),
            )
            stored[name] = {"key": key, "figures": dataclasses.asdict(figures)}
            self.folder.save_state()
        return stored[name]["figures"]
