"""A memory of one's own texts for one's own decoder: texts are added, weights are fitted, and ``generate`` uses them."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trime.common.checks import check_in_vocabulary, check_number, short_repr
from trime.common.io import read_tensors, write_tensors
from trime.common.pretrained import device_of
from trime.common.progress import Progress
from trime.common.types import Float, Int, Tensor
from trime.data.texts import files_of, path_list, read_files
from trime.errors import UserError, install_command
from trime.scoring.mixtures.adaptive import Adaptive
from trime.scoring.mixtures.experts import concat_masses
from trime.serving.server import HOST, serve
from trime.text_memory.decoder import PROBE, Decoder, as_stored
from trime.text_memory.drafting import Drafting, say_without
from trime.text_memory.drafts import Drafts, Pace
from trime.text_memory.experts import DOCUMENT, NEIGHBOURS, TEMPERATURES, TEXT, Experts
from trime.text_memory.held_out import HeldOut, checksum_of_text, from_files, from_stored, near_copies, predicted_bytes
from trime.text_memory.page import write_page
from trime.text_memory.processor import (
    AfterPrompt,
    ExplainedToken,
    MemoryProcessor,
    ReadToken,
    StopAfterPrompt,
    StreamAfterPrompt,
    confidence,
    fit_weights,
    mixed,
    parts_of,
    predict,
)
from trime.text_memory.prompts import padded, prompts_of
from trime.text_memory.segment import Content, Document, Segment, Source
from trime.text_memory.served import ServedMemory
from trime.text_memory.store import TextStore
from trime.text_memory.worth import MemoryEvaluation, Scored

log = logging.getLogger(__name__)

WEIGHTS, SCALE = "weights.safetensors", "scale.safetensors"
# Weights before any fit, by ``python -m benchmarks default_weights``.
DEFAULT, DEFAULT_NGRAMS = (Path(__file__).with_name(f"weights-{name}.safetensors") for name in ("all", "ngrams"))
MEND = "delete it, and fit the memory again"
WAIT = 400  # milliseconds in which changes of files are taken together
SHOWN = 8  # tokens on each side of a source
FOLLOWING, AROUND = 24, 48  # bytes of text behind a place, and on both sides of it, that are read
# Settings of the model's generate that this memory's decides itself, or that it cannot follow.
REFUSED = {"attention_mask", "inputs", "input_ids", "inputs_embeds"}
REFUSED |= {"return_dict_in_generate", "generation_config", "guidance_scale"}
REFUSED |= {"output_scores", "output_logits", "output_attentions", "output_hidden_states"}
ROW = re.compile(r"(.*), (?:row|line) \d+", re.DOTALL)  # the name of a row of a file


class TextMemory:
    """A memory in ``folder`` for a causal language model of transformers and its tokenizer; it is made where there is none.

    ``knn=False`` keeps n-grams alone: texts are then added without reading them by the model, thousands of times faster.
    Raises UserError where the folder holds a memory of another model, tokenizer or ``knn``.
    """

    def __init__(self, model: Any, tokenizer: Any, folder: str | Path, knn: bool = True, window: int = 768, overlap: int = 256):
        self.folder, self.knn = Path(folder).expanduser(), knn
        self.decoder = Decoder(model, tokenizer, window, overlap)
        identity = self.decoder.identity() | {"knn": knn, "contexts": f"{window} after {overlap}" if knn else None}
        self.store = TextStore(self.folder, identity, self.decoder.vocabulary)
        self.memories = (TEXT, DOCUMENT, NEIGHBOURS) if knn else (TEXT, DOCUMENT)
        self._pace = Pace()

    def __len__(self) -> int:
        """Return the number of stored tokens."""
        return sum(len(segment) for segment in self.store.segments())

    @property
    def names(self) -> list[str]:
        """The names of the stored documents."""
        return sorted(self.store.documents())

    def add(self, paths: str | Path | Iterable[str | Path], field: str = "text") -> int:
        """Add the texts in files and folders, and return how many documents were new, had changed, or were removed from files.

        Each is on disk once it is added: an interrupted call goes on where it ended. ``field``: as ``read_texts`` has it.
        """
        known, new, own, paths = self.store.documents(), {}, f"{self.folder.resolve()}/", path_list(paths)
        files = {file: found for file, found in read_files(paths, field) if not file.startswith(own)}
        texts = {text.name: text for found in files.values() for text in found}
        file = {name: file_of(name) for name in known}
        gone = {name for name in known if name not in texts and file[name] in files}
        places = tuple(f"{path.expanduser().resolve()}/" for path in paths)
        lost = {each for each in {*file.values()} - files.keys() if each.startswith(places) and not os.path.exists(each)}
        if missing := [name for name in known if file[name] in lost]:
            log.warning("%d documents stay, whose files are gone: remove(%r) takes one out", len(missing), missing[0])
        for name, text in texts.items():
            checksum = checksum_of_text(text)
            if known.get(name) != checksum:
                tokens = self.decoder.encode(text.content)
                if len(tokens) > 1:
                    new[name] = Document(name, checksum, len(tokens)), tokens, as_stored(text.content).encode()
                elif name in known:
                    gone.add(name)
        if not texts:
            log.warning("there is no text in %s", ", ".join(map(str, paths)))
        if gone:  # texts that are empty now, and rows that their files no longer have
            self.store.remove(gone)
        total = sum(len(tokens) for _, tokens, _ in new.values())
        with Progress(total=total, unit="token", unit_scale=True, desc="add") as bar:
            for document, tokens, content in new.values():
                key = np.concatenate([*self._keys(tokens, bar)]) if self.knn else None
                self.store.add(Content([document], tokens, self.decoder.lines(tokens), key, [content]))
                bar.update(0 if self.knn else len(tokens))
        return len(new) + len(gone)

    def watch(
        self, paths: str | Path | Iterable[str | Path], field: str = "text", until: threading.Event | None = None
    ) -> Iterator[int]:
        """Add files and folders, and then each file as it is saved or deleted; yield how many documents changed each time.

        It goes on ``until`` an event is set, or without end. UserError where the package watchfiles is missing.
        """
        if find_spec("watchfiles") is None:
            raise UserError(f"watching needs the package watchfiles: {install_command('decoder')}")
        from watchfiles import watch

        places, is_first = [path.expanduser().resolve() for path in path_list(paths)], True
        # The watch begins before all is added, so that what is saved meanwhile is not missed.
        for changes in watch(*places, debounce=WAIT, rust_timeout=WAIT, yield_on_timeout=True, stop_event=until):
            if is_first:
                is_first = False
                yield self.add(paths, field)
            elif count := self._follow({path for _, path in changes}, places, field):
                yield count

    def _follow(self, changed: set[str], places: list[Path], field: str) -> int:
        """Add and remove files that have changed; return how many documents did."""
        count, own = 0, f"{self.folder.resolve()}/"
        for path in sorted(path for path in changed if not os.path.exists(path)):
            with suppress(UserError):  # it was not stored
                count += self.remove(path)
        try:
            if saved := sorted(path for path in {*map(str, files_of(places))} & changed if not path.startswith(own)):
                count += self.add(saved, field)
        except UserError as error:  # half a file, or one that is gone again: its next change comes too
            log.warning("%s", error)
        return count

    def remove(self, name: str | Path) -> int:
        """Remove a document, or all below a folder; return how many. UserError where there is none of this name.

        ``name`` is one of ``names``, or a path to where such a file is or was.
        """
        path = str(Path(name).expanduser().resolve()) if str(name) else ""
        inside = tuple(f"{place.rstrip('/')}/" for place in {str(name), path} if place.rstrip("/"))
        rows = re.compile(rf"({re.escape(str(name))}|{re.escape(path)})(, (row|line) \d+)?")
        documents = self.store.documents() if path else {}
        gone = [each for each in documents if rows.fullmatch(each) or each.startswith(inside)]
        if not gone:
            raise UserError(f"{self.folder} holds no document {str(name)!r}: names lists what it holds")
        self.store.remove(gone)
        return len(gone)

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each dimension of this model's contexts, on a text that is the same for all memories."""
        file = self.folder / SCALE
        if not file.exists():
            tokens = torch.from_numpy(self.decoder.encode(PROBE.read_text(encoding="utf-8")))
            contexts = torch.cat([read.context.cpu() for read in self.decoder.read(tokens, logits=False)])
            deviation = contexts.std(0)
            deviation = deviation.clamp(min=float(deviation.mean()) / 100)
            write_tensors(file, {"mean": contexts.mean(0), "deviation": deviation}, {"tokens": len(contexts)})
        tensors = read_tensors(file, MEND)[0]
        return tensors["mean"], tensors["deviation"]

    def _scaled(self, context: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Return contexts as they are compared: each dimension with mean 0 and deviation 1, each context with length 1."""
        if not self.knn:
            return context.cpu()
        mean, deviation = self._scale
        normal = (context.cpu() - mean) / deviation
        return normal / normal.norm(dim=1, keepdim=True).clamp(min=1e-6)

    def _keys(self, tokens: np.ndarray, bar: Any) -> Iterator[np.ndarray]:
        """Yield the keys of a text window by window; the first token has none."""
        yield np.zeros((1, self.decoder.width), np.float16)
        for read in self.decoder.read(torch.from_numpy(tokens), logits=False):
            yield self._scaled(read.context).half().numpy()
            bar.update(len(read.context))

    def _experts(self) -> Experts:
        """Return the experts over what is stored now; UserError where that is nothing."""
        segments = self.store.segments()
        if not segments:
            raise UserError(f"{self.folder} is empty: add texts to it first")
        return Experts(segments, self.memories)

    def _read(self, text: HeldOut) -> Scored:
        """Return the predictions of model and memories for each token of a text but the first."""
        tokens = text.tokens
        columns, features = [], []
        first = 1
        for context, log_probability in self.decoder.read(torch.from_numpy(tokens), logits=True):
            assert log_probability is not None
            target = torch.from_numpy(tokens[first : first + len(context)]).to(log_probability.device)
            columns.append((self._scaled(context), log_probability.gather(1, target[:, None])[:, 0].cpu()))
            features.append(confidence(log_probability).cpu())
            first += len(context)
        query, of_target = (torch.cat(column) for column in zip(*columns, strict=True))
        masses = text.experts.masses(tokens, query, of_target)
        return Scored(masses, torch.cat(features), predicted_bytes(text, self.decoder))

    @torch.inference_mode(False)
    def fit(
        self, paths: str | Path | Iterable[str | Path] | None = None, field: str = "text", seed: int = 0
    ) -> MemoryEvaluation:
        """Fit the weights to held-out texts, and return what the memories are worth there (cross-fitted).

        Without ``paths``, to some of the stored documents, each read as if the memory held all but that one. UserError where
        the texts are too few, or are those of the memory.
        """
        check_number("seed", seed, whole=True)
        experts = self._experts()
        if paths is None:
            texts = from_stored(self.decoder, experts, seed)
        else:
            texts = from_files(paths, field, self.store, self.decoder, experts)
        scored = self._read_all(texts)
        masses, features = concat_masses([each.masses for each in scored]), torch.cat([each.features for each in scored])
        mixture, log_probability = fit_weights(Scored(masses, features), experts.counts, seed)
        loss = {"all": -log_probability}
        note = {"memories": [*self.memories], "temperatures": TEMPERATURES}
        write_tensors(self.folder / WEIGHTS, mixture.state(), note)
        for name in experts.sizes:
            without, counts = experts.chosen(masses, {*experts.sizes} - {name})
            if len(counts) > 1:
                loss[name] = -fit_weights(Scored(without, features), counts, seed)[1]
        predicted = sum(each.bytes for each in scored)
        return MemoryEvaluation.of(len(texts), predicted, masses, loss, near_copies(texts, scored))

    def evaluate(self, paths: str | Path | Iterable[str | Path], field: str = "text") -> MemoryEvaluation:
        """Measure the memories on other texts, with the weights that were fitted."""
        mixture, texts = self._mixture(), from_files(paths, field, self.store, self.decoder, self._experts())
        scored = self._read_all(texts)
        loss = {"all": torch.cat([-mixed(mixture, each) for each in scored])}
        masses, predicted = concat_masses([each.masses for each in scored]), sum(each.bytes for each in scored)
        return MemoryEvaluation.of(len(texts), predicted, masses, loss, near_copies(texts, scored))

    def score(self, text: str) -> Float[Tensor, " n"]:
        """Return the log-probability in nats of each token of a text after the ones before it; the first has none."""
        return mixed(self._mixture(), self._read(HeldOut("", text, self._tokens_of(text), self._experts())))

    def _tokens_of(self, text: str) -> np.ndarray:
        """Return the tokens of a text; UserError where there are fewer than two."""
        tokens = self.decoder.encode(text)
        if len(tokens) < 2:
            raise UserError(f"a text of {len(tokens)} tokens has nothing to predict: pass at least two")
        return tokens

    def _read_all(self, texts: list[HeldOut]) -> list[Scored]:
        """Read texts with a progress bar, each as a document of its own."""
        scored = []
        for number, text in enumerate(Progress(texts, unit="text", desc="read")):
            read = self._read(text)
            scored.append(read._replace(masses=read.masses._replace(document=read.masses.document + number)))
        return scored

    def _mixture(self) -> Adaptive:
        """Return the fitted mixture, or one that comes with this package; UserError where it was fitted with other memories."""
        file = self.folder / WEIGHTS
        if not file.exists():
            say_default(str(self.folder))
            file = DEFAULT if self.knn else DEFAULT_NGRAMS
        state, note = read_tensors(file, MEND)
        if note["memories"] != [*self.memories]:
            raise UserError(f"{file} has weights of other memories than {', '.join(self.memories)}: fit them again")
        mixture = Adaptive(note["temperatures"], history=[])
        mixture.load(state)
        return mixture

    def processor(self, healed: list[str] | None = None) -> MemoryProcessor:
        """Return a logits processor for ``generate`` of this memory's model."""
        return MemoryProcessor(self.decoder, self._scaled, self._experts(), self._mixture(), healed)

    def drafting(self, mix: bool = True, expect: str | None = None, streamer: Any = None) -> Drafting:
        """Return what ``generate`` of this memory's model takes as ``custom_generate``: it writes the same text in fewer calls.

        ``mix=False``: the model's own text, without the memories; ``expect``: a text that is likely to be written. transformers
        hands no ``streamer`` on: pass it here too.
        """
        return self._drafting(self.processor() if mix else None, expect, streamer)

    def _drafting(self, processor: MemoryProcessor | None, expect: str | None, streamer: Any) -> Drafting:
        experts = processor.experts if processor else self._experts()
        expected = None if expect is None else np.array(self.decoder.inside(as_stored(expect)), np.int64)
        return Drafting(self.decoder, Drafts(experts, self._pace, expected), processor, streamer)

    def generate(
        self, prompt: Any, max_new_tokens: int = 64, mix: bool = True, expect: str | None = None, **settings: Any
    ) -> Any:
        """Continue a prompt, or each of several, and return the text; ``settings`` are those of the model's ``generate``.

        A prompt is a text, a chat (messages with role and content, as the tokenizer's template takes them), or token numbers.
        The last word of a text, or the blanks at its end, are written again with what follows: a token of the stored texts may
        begin there and end later. Processors, ``stop_strings`` and a ``streamer`` see it as given. A single prompt is continued
        with drafts, as ``drafting`` has it. ``mix=False``: the model continues by itself, and the memory only drafts.
        """
        prompts, is_one = prompts_of(prompt, self.decoder, heal=mix)
        check_number("max_new_tokens", max_new_tokens, at_least=1, whole=True)
        if own := sorted(REFUSED & {*settings}):
            raise UserError(
                f"generate takes no {', '.join(own)}: call the model's own with logits_processor=[memory.processor()]"
            )
        # They are written again, some in more tokens than others.
        again = [len(self.decoder.inside(each.end)) if each.end else 0 for each in prompts]
        room = [max_new_tokens + count for count in again]
        tokenizer, processor = self.decoder.tokenizer, self.processor([each.end for each in prompts]) if mix else None
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        tokens, mask = (each.to(device_of(self.decoder.model)) for each in padded(prompts, padding or 0))
        processors = [*(settings.pop("logits_processor", None) or [])]
        if processor is not None:
            processors = [*(AfterPrompt(each, processor) for each in processors), processor]
        settings = {"pad_token_id": padding, "do_sample": False, **settings}
        if settings.get("min_new_tokens"):
            settings["min_new_tokens"] += min(again)
        if stops := settings.pop("stop_strings", None):
            settings.pop("tokenizer", None)  # the model's own needs one
            criterion = StopAfterPrompt([stops] if isinstance(stops, str) else [*stops], prompts, self.decoder)
            settings["stopping_criteria"] = [*(settings.get("stopping_criteria") or []), criterion]
        if settings.get("streamer"):
            settings["streamer"] = StreamAfterPrompt(settings["streamer"], prompts[0], self.decoder, processor)
        settings.setdefault("custom_generate", self._drafting(processor, expect, settings.get("streamer")))
        with self.decoder.with_scores():
            output = self.decoder.model.generate(
                tokens,
                attention_mask=mask,
                logits_processor=processors,
                max_new_tokens=max(room),
                **settings,
            )
        special, repeats, texts = {*tokenizer.all_special_ids}, len(output) // len(prompts), []
        for number, row in enumerate(output[:, tokens.shape[1] :].tolist()):
            of = number // repeats
            text, end = self.decoder.text_of([token for token in row[: room[of]] if token not in special]), prompts[of].end
            texts.append(text[len(end) :] if text.startswith(end) else "")
        return texts[0] if is_one and repeats == 1 else texts

    def serve(self, host: str = HOST, port: int = 0, token: str | None = None) -> None:
        """Serve this memory and its model as OpenAI's API does, with a page that explains texts, until it is interrupted.

        ``port`` 0 is one that is free; other machines need ``host`` and ``token``, and send the token as the API key.
        """
        self.processor()  # it must be possible now
        serve(ServedMemory(self), host, port, token)

    def count(self, text: str) -> int:
        """Count the occurrences of a text in the stored texts, as ``str.count`` does."""
        wanted = searched(text)
        return sum(document.count(wanted) for _, _, document in self._texts())

    def next(self, text: str) -> dict[str, int]:
        """Return the continuations of a text in the memory with their counts, the most frequent first."""
        wanted, rest = searched(text), Counter[str]()
        for _, _, document in self._texts():
            _, *parts = document.split(wanted)
            rest.update((part + wanted)[:FOLLOWING].decode(errors="ignore") for part in parts[:-1])
            rest.update(part[:FOLLOWING].decode(errors="ignore") for part in parts[-1:] if part)
        followers = Counter[str]()
        for following, count in rest.items():
            followers[self.decoder.text_of(self.decoder.inside(following)[:1])] += count
        return dict(followers.most_common())

    def find(self, text: str, limit: int = 10) -> list[tuple[Source, str]]:
        """Return the first ``limit`` places of a text in the memory, each with the text around it.

        A source's ``place`` is that of the first token that begins on its line.
        """
        check_number("limit", limit, at_least=1, whole=True)
        wanted, found = searched(text), list[tuple[Source, str]]()
        leading = len(text) - len(text.lstrip("\n"))
        for segment, number, document in self._texts():
            at = document.find(wanted)
            while at >= 0 and len(found) < limit:
                line = document.count(b"\n", 0, at) + leading + 1
                source = Source(segment.documents[number].name, line, segment.place_of_line(number, line))
                around = document[max(0, at - AROUND) : at + len(wanted) + AROUND]
                found.append((source, around.decode(errors="ignore")))
                at = document.find(wanted, at + len(wanted))
        return found

    def _texts(self) -> Iterator[tuple[Segment, int, bytes]]:
        """Yield the stored texts in UTF-8, each with its segment and its number there; UserError where there are none."""
        for segment in self._experts().segments:
            texts, edges = segment.texts(), segment.offsets
            for number in range(len(segment.documents)):
                if texts is None:  # of an earlier version: what its tokens say
                    tokens = segment.tokens(int(edges[number]), int(edges[number + 1]))
                    yield segment, number, self.decoder.text_of(tokens[len(self.decoder.start) :]).encode()
                else:
                    yield segment, number, texts[number]

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Let every ``generate`` of the model use the memory within a ``with`` block, and draft where it can."""
        before, generate = vars(model).get("generate"), model.generate
        self.processor()  # it must be possible now

        def with_memory(
            inputs: Any = None,
            generation_config: Any = None,
            logits_processor: Iterable[Any] | None = None,
            *others: Any,
            **settings: Any,
        ) -> Any:
            if settings.get("guidance_scale", 1) not in (None, 1):
                raise UserError("guidance_scale reads each token twice, which a memory cannot tell apart: leave it out")
            if settings.get("assistant_model"):
                raise UserError("the memory drafts by itself: leave out assistant_model")
            processor, given = self.processor(), [*others, *settings.values()]
            streamer = next((each for each in given if hasattr(each, "put") and hasattr(each, "end")), None)
            if settings.get("tokenizer"):  # of stop strings, which transformers forgets beside a custom_generate
                say_without("the tokenizer that generate is given")
            else:
                settings.setdefault("custom_generate", self._drafting(processor, None, streamer))
            return generate(inputs, generation_config, [*(logits_processor or []), processor], *others, **settings)

        model.generate = with_memory
        try:
            yield
        finally:
            del model.generate
            if before is not None:
                model.generate = before

    def explain(self, output: Any, first: int = 1, sources: int = 3) -> list[list[ExplainedToken]]:
        """Return for each row of tokens, such as ``generate`` returns, where each came from; from number ``first`` on.

        Tokens of a run that is stored word for word name that run: its length, and the file and line of its beginning.

        ``output``: token numbers [l] or [b l]; UserError for anything else.
        """
        check_number("first", first, at_least=0, whole=True)
        check_number("sources", sources, at_least=0, whole=True)
        result = []
        for row in rows_of(output).numpy():
            tokens = self.decoder.without_padding(row)
            begin, tokens = max(first - (len(row) - len(tokens)), 1), self.decoder.without_end(tokens)
            check_in_vocabulary("output", torch.from_numpy(tokens), self.decoder.embedded)
            result.append(self.with_runs([self.explained(read, sources) for read in self.read(tokens, begin)], tokens))
        return result

    def with_runs(self, explained: list[ExplainedToken], tokens: np.ndarray) -> list[ExplainedToken]:
        """Return the last tokens of a text with the runs among them that are stored word for word."""
        begin = len(tokens) - len(explained)
        for at, run in self._experts().runs(tokens, begin):
            own = slice(at - begin, at - begin + run.tokens)
            explained[own] = [token._replace(run=run) for token in explained[own]]
        return explained

    def explain_page(self, file: str | Path, output: Any, first: int = 1, title: str = "Where each token came from") -> Path:
        """Write a page that explains the first row of ``output`` from token ``first`` on; return its file."""
        row = rows_of(output)[0]
        (tokens,) = self.explain(row, first)
        given = self.decoder.tokenizer.decode(row[: max(first, 1)].tolist(), skip_special_tokens=True)
        return write_page(file, title, tokens, given)

    def read(self, tokens: np.ndarray, first: int = 1) -> Iterator[ReadToken]:
        """Yield the tokens of a text from number ``first`` (at least 1) on, with what was predicted before each."""
        experts, mixture, place = self._experts(), self._mixture(), 1
        for context, log_probability in self.decoder.read(torch.from_numpy(tokens), logits=True):
            assert log_probability is not None
            queries, rows = self._scaled(context), range(max(first - place, 0), len(context))
            found = experts.nearest(queries[rows.start :]) if rows else None
            for row in rows:
                before, token, near = tokens[: place + row], int(tokens[place + row]), found and found.of_row(row - rows.start)
                prediction = predict(experts, mixture, before, log_probability[row : row + 1], near)
                yield ReadToken(token, before, near, float(log_probability[row, token]), prediction, experts)
            place += len(context)

    def explained(self, read: ReadToken, sources: int) -> ExplainedToken:
        """Return where a token that was read came from."""
        parts = parts_of(read.experts, read.prediction, read.token, read.own)
        found = read.experts.sources(read.before, read.token, sources, read.found)
        shown = [(memory, source, self._surroundings(read.experts, segment, source)) for memory, segment, source in found]
        return ExplainedToken(read.token, self.decoder.text_of([read.token]), sum(parts.values()), parts, shown[: 2 * sources])

    def _surroundings(self, experts: Experts, segment: int, source: Source) -> str:
        """Return the text around a source, tokens on both sides."""
        around = experts.segments[segment].around(source.place, SHOWN)
        return str(self.decoder.tokenizer.decode(around.tolist()))


@cache
def say_default(folder: str) -> None:
    log.warning(
        "%s uses weights that were fitted on other texts and models: fit() makes better ones of the stored texts", folder
    )


def searched(text: str) -> bytes:
    """Return a text as it is searched for; UserError where it is empty."""
    if not text:
        raise UserError("an empty text occurs everywhere: pass at least one letter")
    return as_stored(text).encode()


def rows_of(output: Any) -> Int[Tensor, "b l"]:
    """Return rows of tokens; UserError where ``output`` is something else."""
    try:
        rows = torch.as_tensor(output)
    except (TypeError, ValueError, RuntimeError):
        rows = torch.zeros(0)
    if not rows.numel() or not rows.dim() or rows.is_floating_point() or rows.dtype == torch.bool:
        raise UserError(f"output={short_repr(output)}: pass token numbers, as generate or the tokenizer returns them")
    return rows.reshape(-1, rows.shape[-1]).cpu().long()


def file_of(name: str) -> str:
    """Return the file of a document, of which it may be a row."""
    row = ROW.fullmatch(name)
    return row[1] if row else name
