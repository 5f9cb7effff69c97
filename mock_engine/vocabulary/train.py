"""Trains the bundled vocabulary: byte-level BPE with 8192 entries, on text of this project and on made-up sentences.

    python -m mock_engine.vocabulary.train --out mock_engine/vocabulary/bpe-8k

The text is the licence, the Markdown and the docstrings found under `--root`, so a later training differs where the
project's own words have changed; the sentences are built from the word lists below with a fixed seed. Role marks of the
default chat template are special tokens, as in the vocabularies of real chat models, and a completion's prompt begins
with one more (`<|bos|>`).
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mock_engine.tokenizer import SPECIALS

VOCAB_SIZE = 8192
SENTENCES = 40_000
ROOMS = ("workloads", "mock_engine", "routers", "reports", "harness")

_STEMS = """
act add agree allow answer appear apply arrange ask attend balance bake bear begin believe belong blend block blow
board boil book border borrow bound branch break breathe bridge bring brush build burn bus buy cache call camp care
carry carve cast catch cause chain change charge chart chase check choose circle claim class clean clear climb clock
close cloud coast code collect colour comb come command compare complete connect consider contain cook copy corner
correct count cover crack create cross crowd cure curve cut dance deal decide deliver demand depend describe desk
detail develop differ dig dine direct discover divide draft draw dream dress drift drink drive drop dry earn east
echo edge edit embrace employ empty end enjoy enter equal even evict exist expect explain express extend face fade
fail fall farm fasten feed feel fetch field fight fill filter find finish fire fit fix flash float flow fly fold
follow force forest forget form forward frame free freeze garden gather give glass glide glow govern grant grasp
great green greet grind group grow guard guess guide hammer hand handle happen harbour harvest haul head heal hear
heat help hide hill hold hope house hunt hurry imagine improve include increase inform inspect invent invite island
join judge jump keep kick kind knit knock know label ladder land laugh launch lead lean learn leave lend level lift
light like limit line link list listen live load lock long look loop lose love lower machine mail make manage map
march mark market master match matter mean measure meet melt memory mend merge mind mirror miss mix model moon
morning mount move music name narrow near need night node note notice number observe obtain offer open order own pack
page paint pair paper park part pass patch path pause pay peel perform phrase pick pilot place plain plan plant plate
play please point polish pool port pour power practise prefer prepare present press print produce promise prompt
protect prove provide publish pull push question queue quick quiet race rain raise range rate reach read ready reason
receive record reduce refer reflect refuse regard remain remember remove render repair repeat reply report request
rescue reset resist rest result return reveal ride ring rise river road rock roll roof room root route row rule run
sail sample save scale scatter school score search season seat second seed seek select sell send sense serve session
settle shade shake shape share sharp shelf shift shine ship shore short shout show sign silver sing sink sketch skill
sleep slide slow smile smooth snow soft solve sort sound source space speak speed spell spend split spread spring
stable stage stand star start state stay steam step stick stone stop store storm story stream street stretch strike
strong study suggest suit summer supply support surface swim switch table take talk task taste teach tell test text
thank thick think thread throw tie time token tool top touch tower trace track trade train travel treat tree trip
trust try turn type understand update use value vary view village visit voice wait wake walk wall want warm wash
waste watch water wave wear weave weigh welcome west wheel whisper wide wild win wind window wing winter wire wish
wonder wood word work world worry write yard year yield
"""
_PREFIXES = ("", "", "", "", "re", "un", "over", "under", "out", "pre", "inter", "sub", "mis", "co", "counter")
_SUFFIXES = (
    "", "", "", "s", "ed", "ing", "er", "ers", "able", "ment", "ness", "ful", "less", "ly", "ward", "ish", "ship",
)  # fmt: skip
_SMALL = """
the a an this that these those my your our their its some any each every no one two three many few of in on at by for
with from to into over under after before between through and or but so because if when while as than then there here
now it he she we they you who which what is are was were be been has have had do does did will would can could may
might must should not only also very more most less such other same well even still just
"""
_SHAPES = (
    "{} {} the {} {}.", "How does the {} {} {}?", "A {} {}, and the {} {}.", "If you {} the {}, {} {} it.",
    "Please {} my {} {} the {}.", "\n- {}: {} {} {}\n", "def {}({}):\n    return {}({})\n", "{}_{} = {}[{}]\n",
    '{{"{}": "{}", "{}": {}}}', "First {}, then {} the {} {}.",
)  # fmt: skip


def sentences(count: int, seed: int = 0) -> Iterator[str]:
    """Made-up text with the habits of chats, code and data; the same for the same seed."""
    rng = Random(seed)
    stems, small = _STEMS.split(), _SMALL.split()

    def word() -> str:
        if rng.random() < 0.35:
            return rng.choice(small)
        return rng.choice(_PREFIXES) + rng.choice(stems) + rng.choice(_SUFFIXES)

    for _ in range(count):
        shape = rng.choice(_SHAPES)
        holes = shape.count("{}")
        words = [word() if rng.random() > 0.06 else str(rng.randrange(1000)) for _ in range(holes)]
        yield " " + shape.format(*words)


def own_text(root: Path) -> Iterator[str]:
    """Licence, Markdown and docstrings of the project at `root`, in a fixed order."""
    for name in ("LICENSE", "README.md"):
        if (root / name).is_file():
            yield (root / name).read_text(encoding="utf-8")
    for path in sorted((root / "docs").rglob("*.md")):
        yield path.read_text(encoding="utf-8")
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def train(texts: Iterator[str] | list[str], vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", SPECIALS["<|bos|>"])]
    )
    return made


def compact(made: tokenizers.Tokenizer) -> str:
    """The file's text in its short form: no white space, a merge as two words."""
    whole = json.loads(made.to_str())
    model = whole["model"]
    model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(), help="the project's folder (default: this one)")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets tokenizer.json and its config")
    args = parser.parse_args()
    text = compact(train([*own_text(args.root), *sentences(SENTENCES)]))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokenizer.json").write_text(text, encoding="utf-8")
    config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "model_max_length": 131072}
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out / 'tokenizer.json'}: {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
