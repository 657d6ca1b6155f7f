"""Checks the chat templates of a folder, and prints the tables of docs/chat-template-results.md, a row for each.

    python benchmarks/check_templates.py FOLDER      # each FOLDER/*.jinja, also with its family if it is a known one
    python benchmarks/check_templates.py --released  # the families of the package `renderers`, without a template

No model is needed. Each template gets a tokenizer whose tokens are bytes, and one token for each control token that the
template or the family names. So the check covers what is rendered and the control tokens, but not how the tokenizer of
the model splits text.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from renderers.base import MODEL_RENDERER_MAP
from tokenizers import AddedToken

from verl_server.agent.environments import find_unread_call
from verl_server.errors import UnsupportedError
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import CheckedConversation, TemplateReport, Verdict, check_template, get_renderer
from verl_server.trajectory.template_check import CONVERSATIONS, KNOWN_ARGUMENTS

#: Template files and the family of the package `renderers` to which they belong.
FAMILIES = {
    "GLM-4.6": "glm-4.5",
    "GLM-4.7-Flash": "glm-5",
    "MiniMax-M2": "minimax-m2",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3",
    "Qwen-Qwen3-0.6B": "qwen3",
    "Qwen3.5-4B": "qwen3.5",
    "glm4moe": "glm-4.5",
    "google-gemma-4-31B-it": "gemma4",
    "llama3_2": "llama-3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama-3",
    "moonshotai-Kimi-K2": "kimi-k2",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "openai-gpt-oss-120b": "gpt-oss",
    "qwen3": "qwen3",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_vl": "qwen3-vl",
}
#: Arguments of families without which their first prompts have another date than the template.
ARGUMENTS = {"llama-3": {"date_string": "26 Jul 2024"}}
CONTROL_TOKEN = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s'\"{}]+[|\uff5c]>|<\|[a-z_\"]+>|<[a-z_\"]+\|>|<\|\"\|>|\[\|[^|\]\s]+\|\]"
    r"|\[/?[A-Z_]{3,}\]|</?[A-Za-z][A-Za-z_:]*>|\]~!?b\]|\]~b\]|\[e~\["
)
"""Text in a template that looks like a control token."""
PLAIN_TOKEN = re.compile(r"</?[a-z][a-z_]*>")
"""Tokens that tokenizers do not call special, for example `<think>`."""
TURN_TOKENS = ("<start_of_turn>", "<end_of_turn>")
"""Control tokens that look like tokens which are not special."""
FIRST_TOKENS = ("<|begin_of_text|>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<bos>")
"""Tokens at the beginning of a prompt."""
MISSING_TOKEN = re.compile(r"'([^'\s]{2,40})'")
"""A token in the error of a family that does not find the token in the tokenizer."""
MAX_MISSING_TOKENS = 80
SYMBOLS = {
    Verdict.EQUAL: "=",
    Verdict.KEPT: "k",
    Verdict.REFUSED: "r",
    Verdict.UNVERIFIED: "u",
    Verdict.DIFFERENT: "**X**",
}
#: Beginnings of kinds of reasons in the table, and a text that is in the reasons of the kind.
KINDS = {
    "not shown": "does not show the content",
    "tools not shown": "does not show the tools",
    "template refuses": "chat template refuses",
    "family refuses": "the family '",
    "first prompt": "of the first prompt, ",
    "thought": "removes the thought",
    "end marker": "closes the turn with",
    "changed later": "changes an earlier message",
    "moved text": "moves the text of turn",
    "differs after calls": "differently after tool calls",
    "token boundary": "at the ends of turns",
    "turn": "turn ",
}


def tokenizer_for(texts: str) -> Any:
    """A tokenizer of bytes with one token for each control token in `texts`."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
    tokenizer.name_or_path = ""
    add_tokens(tokenizer, CONTROL_TOKEN.findall(texts))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def name_first_token(tokenizer: Any) -> None:
    """Set `bos_token` to the token that a model family calls so. Templates use the variable."""
    if names := [name for name in FIRST_TOKENS if name in tokenizer.get_vocab()]:
        tokenizer.bos_token = names[0]


def add_tokens(tokenizer: Any, names: Iterable[str]) -> None:
    """Add tokens. Those that look like `<think>` are not special."""
    for name in dict.fromkeys(names):
        is_plain = PLAIN_TOKEN.fullmatch(name) and name not in TURN_TOKENS
        tokenizer.add_tokens([AddedToken(name, special=not is_plain, normalized=False)])


def add_family_tokens(tokenizer: Any, family: str) -> None:
    """Add the control tokens that a family does not find. Its errors name the tokens."""
    for _ in range(MAX_MISSING_TOKENS):
        try:
            get_renderer(tokenizer, family)
        except UnsupportedError as error:
            if not (names := [name for name in MISSING_TOKEN.findall(error.message) if name != family]):
                break
            add_tokens(tokenizer, names)
        else:
            break
    name_first_token(tokenizer)


def check(tokenizer: Any, family: str | None, **arguments: Any) -> tuple[TemplateReport, str]:
    """The report of a template, and whether agent loops find the calls that the template writes."""
    report = check_template(tokenizer, family, **arguments)
    problem = None if report.refusal else find_unread_call(get_renderer(tokenizer, family, **arguments))
    return report, "-" if problem is None else "no" if problem else "yes"


def row_of(name: str, report: TemplateReport, calls: str) -> str:
    """The row of a template in the table. `calls`: whether agent loops find the calls that the template writes."""
    if report.refusal:
        cells = ["-"] * (len(CONVERSATIONS) + 2)
        return f"| `{name}` | {report.renderer} | {' | '.join(cells)} | refused: {kind_of(report.refusal)} |"
    rows = {row.name: row for row in report.conversations}
    cells = [SYMBOLS[rows[conversation.name].verdict] for conversation in CONVERSATIONS]
    arguments = [row for row in report.conversations if row.name.startswith(KNOWN_ARGUMENTS) and "=" in row.name]
    cells += ["".join(SYMBOLS[row.verdict] for row in arguments) or "-", calls]
    return f"| `{name}` | {report.renderer} | {' | '.join(cells)} | {reasons_of(report.conversations)} |"


def reasons_of(rows: Iterable[CheckedConversation]) -> str:
    """The kinds of reasons behind the symbols of a row."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict not in (Verdict.EQUAL, Verdict.DIFFERENT):
            found = kinds.setdefault(SYMBOLS[row.verdict], [])
            found.extend({kind_of(row.reason)} - set(found))
    return "; ".join(f"{symbol}: {', '.join(found)}" for symbol, found in kinds.items())


def kind_of(reason: str) -> str:
    """A short name for a reason. The table does not quote templates."""
    return next((kind for kind, text in KINDS.items() if text in reason), "template depends on the history")


def print_table(rows: Iterable[str]) -> None:
    """Print the rows with the head of the table, and what the columns are."""
    columns = [*(str(number) for number in range(1, len(CONVERSATIONS) + 1)), "args", "calls"]
    print(f"| template | renderer | {' | '.join(columns)} | reasons |")
    print(f"|---|---|{'---|' * len(columns)}---|")
    for row in rows:
        print(row)
    print("\n" + "\n".join(f"{number}. {each.name}" for number, each in enumerate(CONVERSATIONS, 1)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder with *.jinja files")
    parser.add_argument("--released", action="store_true", help="check the families of the package `renderers`")
    options = parser.parse_args()
    if options.folder is None and not options.released:
        parser.error("pass a folder with *.jinja files, or --released")
    rows = []
    for path in sorted(options.folder.glob("*.jinja")) if options.folder else ():
        template, family = path.read_text(), FAMILIES.get(path.stem)
        for name in (None, family) if family else (None,):
            tokenizer = tokenizer_for(template)
            if name:
                add_family_tokens(tokenizer, name)
            tokenizer.chat_template = template
            rows.append(row_of(path.stem, *check(tokenizer, name, **ARGUMENTS.get(name or "", {}))))
    for name in sorted(set(MODEL_RENDERER_MAP.values())) if options.released else ():
        tokenizer = tokenizer_for("")
        tokenizer.chat_template = None
        add_family_tokens(tokenizer, name)
        rows.append(row_of(name, *check(tokenizer, name)))
    print_table(rows)


if __name__ == "__main__":
    main()
