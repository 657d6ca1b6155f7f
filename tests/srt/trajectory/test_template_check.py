"""The check of chat templates: each kind of template gets the verdict that it deserves."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import LLAMA, QWEN, chat_tokenizer
from typer.testing import CliRunner

from verl_server import BadInputError
from verl_server.cli.app import app
from verl_server.errors import UnsupportedError
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, FamilyRenderer, TemplateReport, Verdict, check_template
from verl_server.trajectory.rendering.families import PROBE_TOOL
from verl_server.trajectory.template_check import GrownPrompt, TurnText, compare

RIGHT = (
    "{%- for t in tools or [] %}{{ t.function.name + ' ' }}{%- endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows each message in the same way, wherever it is."""
DROPS_RESULTS = RIGHT.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'tool' %}")
DROPS_SYSTEM = RIGHT.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
DROPS_EARLIER_THOUGHTS = RIGHT.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
REFUSES_TOOLS = RIGHT.replace(
    "{%- for m in messages %}",
    "{%- for m in messages %}{%- if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}",
)
REFUSES_ALL = "{{ raise_exception('not today') }}"
NUMBERS_LATER_USERS = RIGHT.replace(
    "{{ m.role + '\n' }}", "{{ m.role }}{%- if loop.index0 > 6 %} {{ loop.index }}{%- endif %}{{ '\n' }}"
)
"""Writes a number into the header of each message after the seventh: only after longer histories than are probed."""
MOVES_TOOLS = "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}" + RIGHT.replace(
    "{%- for t in tools or [] %}{{ t.function.name + ' ' }}{%- endfor %}", ""
).replace(
    "{%- for m in messages %}",
    "{%- for m in messages %}{%- if m == users[-1] %}{%- for t in tools or [] %}<tools>{{ t.function.name }}</tools>"
    "{%- endfor %}{%- endif %}",
)
"""As Mistral's: the tools are before the last message of a user."""
ENDS_CALLS_OTHERWISE = RIGHT.replace(
    "<|im_end|>\n{% endfor %}",
    "{{ '<|eom_id|>' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}<|im_start|>assistant\n",
).replace("{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", "")
"""As Cohere's: another marker ends a turn with calls, and the header of the next turn is always there."""
THINKING_ARGUMENT = RIGHT.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}"
    "{% endif %}",
)


@pytest.fixture(scope="module")
def made_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(made_tokenizer: Any) -> Any:
    """A tokenizer of the test alone, which sets its template and adds tokens."""
    return copy.deepcopy(made_tokenizer)


def check(tokenizer: Any, template: str | None, *arguments: Any, **template_arguments: Any) -> TemplateReport:
    tokenizer.chat_template = template
    return check_template(tokenizer, *arguments, **template_arguments)


def verdicts(report: TemplateReport) -> dict[str, Verdict]:
    return {row.name: row.verdict for row in report.conversations}


def reason(report: TemplateReport, name: str) -> str:
    return next(row.reason for row in report.conversations if row.name == name)


WITH_RESULTS = {
    "tool result",
    "text and call",
    "two tool rounds",
    "two results",
    "result and user",
    "answer after result",
    "thinking and tool",
    "control tokens of a tool",
}
"""Conversations with the result of a tool."""


def test_a_right_template_is_equal_in_all_conversations(tokenizer: Any) -> None:
    report = check(tokenizer, RIGHT)
    assert set(verdicts(report).values()) == {Verdict.EQUAL}, report
    assert verdicts(report).keys() > WITH_RESULTS
    assert (report.renderer, report.refusal, report.is_usable) == ("generic", "", True)


def test_dropped_messages_are_refused(tokenizer: Any) -> None:
    report = check(tokenizer, DROPS_RESULTS)
    refused = {name for name, verdict in verdicts(report).items() if verdict is Verdict.REFUSED}
    assert refused == WITH_RESULTS
    assert "does not show the content of message 0 (role 'tool')" in reason(report, "tool result")
    assert report.is_usable
    report = check(tokenizer, DROPS_SYSTEM)
    refused = {name for name, verdict in verdicts(report).items() if verdict is Verdict.REFUSED}
    assert refused == {"system message", "later system message"}
    assert verdicts(report)["one turn"] is Verdict.EQUAL


@pytest.mark.parametrize("template", [DROPS_EARLIER_THOUGHTS, QWEN])
def test_thoughts_that_the_template_drops_are_kept(tokenizer: Any, template: str) -> None:
    """Both for a thought of its own key and for a thought in the content."""
    report = check(tokenizer, template)
    assert verdicts(report)["thinking"] is Verdict.KEPT
    assert reason(report, "thinking") == "the template removes the thought of turn 1, which the prompt keeps"
    assert verdicts(report)["several turns"] is Verdict.EQUAL
    assert report.is_usable


def test_a_template_that_raises_is_refused(tokenizer: Any) -> None:
    report = check(tokenizer, REFUSES_ALL)
    assert "not today" in report.refusal
    assert report.conversations == ()
    assert not report.is_usable
    report = check(tokenizer, None)
    assert "no chat template" in report.refusal


def test_a_conversation_that_only_the_template_refuses_is_unverified(tokenizer: Any) -> None:
    """The renderer does not render the calls of the policy, only the results."""
    report = check(tokenizer, REFUSES_TOOLS)
    assert {name for name, verdict in verdicts(report).items() if verdict is Verdict.UNVERIFIED} == WITH_RESULTS
    assert "no calls" in reason(report, "two results")
    assert report.is_usable


def test_a_suffix_that_depends_on_the_history_is_different(tokenizer: Any) -> None:
    """The probes of the renderer have shorter histories."""
    report = check(tokenizer, NUMBERS_LATER_USERS)
    different = {name for name, verdict in verdicts(report).items() if verdict is Verdict.DIFFERENT}
    assert different == {"several turns"}
    found = reason(report, "several turns")
    assert found.startswith("after turn 4: ")
    assert r"<|im_start|>user' the renderer writes '\nLast, the figs." in found
    assert r"the template ' 9\nLast, the figs." in found
    assert not report.is_usable


def test_tools_that_the_template_moves_are_kept(tokenizer: Any) -> None:
    report = check(tokenizer, MOVES_TOOLS)
    assert verdicts(report)["tool result"] is Verdict.EQUAL
    assert verdicts(report)["answer after result"] is Verdict.KEPT
    assert reason(report, "answer after result") == (
        "the template moves '<tools>count_fruit</tools>' of the first prompt, and the prompt has it in both places"
    )


def test_results_after_calls_with_another_end_marker_are_refused(tokenizer: Any) -> None:
    """The suffix after a turn without calls has an end marker that the template does not write after calls."""
    report = check(tokenizer, ENDS_CALLS_OTHERWISE)
    assert verdicts(report)["tool result"] is Verdict.REFUSED
    assert "renders results differently after tool calls" in reason(report, "tool result")
    assert verdicts(report)["several turns"] is Verdict.EQUAL


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_template_that_writes_messages_differently_with_tools(tokenizer: Any, role: str) -> None:
    """Later prompts are rendered with the tools, too."""
    brackets = f"'[' ~ m.content ~ ']' if tools and m.role == '{role}' else m.content"
    report = check(tokenizer, RIGHT.replace("{{ m.content }}", f"{{{{ {brackets} }}}}"))
    assert set(verdicts(report).values()) == {Verdict.EQUAL}, report
    text = tokenizer.apply_chat_template([{"role": role, "content": "x"}], tools=[PROBE_TOOL], tokenize=False)
    assert "[x]" in text


def test_a_suffix_that_depends_on_the_history_only_with_tools_is_refused(tokenizer: Any) -> None:
    template = RIGHT.replace("{{ m.content }}", "{{ m.content }}{{ loop.index if tools and m.role == 'user' else '' }}")
    tokenizer.chat_template = template
    renderer = ChatRenderer(tokenizer)
    renderer.render_prompt([{"role": "user", "content": "a"}])
    with pytest.raises(UnsupportedError, match="'user' messages differently after different histories"):
        renderer.render_prompt([{"role": "user", "content": "a"}], [PROBE_TOOL])


def test_arguments_of_the_template_are_checked(tokenizer: Any) -> None:
    report = check(tokenizer, THINKING_ARGUMENT)
    assert "enable_thinking=True" in verdicts(report)
    assert verdicts(report)["enable_thinking=False"] is Verdict.KEPT
    assert "'<think></think>' from turn" in reason(report, "enable_thinking=False") or "thought" in reason(
        report, "enable_thinking=False"
    )
    assert not any("=" in name for name in verdicts(check(tokenizer, RIGHT)))
    with_argument = check(tokenizer, THINKING_ARGUMENT, enable_thinking=False)
    assert verdicts(with_argument)["one turn"] is Verdict.KEPT
    assert "no variable 'thinking'" in check(tokenizer, RIGHT, thinking=True).refusal


def test_control_tokens_that_a_renderer_lets_through_are_different(tokenizer: Any) -> None:
    """Compared with the text alone they are equal."""
    turn = TurnText("<a>", "yes<end>", "yes", "", "<u>no<a>")
    assert (
        compare(GrownPrompt("<u>x<a>", (turn,), "<a>", ("x", "no")), "<u>x<a>yes<end><u>no<a>").verdict is Verdict.EQUAL
    )
    finding = compare(GrownPrompt("<u>x<a>", (turn,), "<a>", ("x", "no", "z")), "<u>x<a>yes<end><u>z<u>no<a>")
    assert finding.verdict is Verdict.DIFFERENT, "a message that the renderer dropped"


def test_families_are_compared_with_the_template(tokenizer: Any) -> None:
    """Without a template, they are compared with their own rendering of the whole conversation."""
    alone = check(tokenizer, None, "llama-3")
    assert (alone.renderer, alone.refusal) == ("family llama-3", "")
    assert Verdict.DIFFERENT not in verdicts(alone).values()
    other = check(tokenizer, LLAMA, "llama-3")
    assert verdicts(other)["one turn"] is Verdict.DIFFERENT
    assert reason(other, "one turn").startswith("first prompt: after '<|begin_of_text|>")
    assert "not of the family 'kimi-k2'" in check(tokenizer, LLAMA, "kimi-k2").refusal
    with pytest.raises(BadInputError, match="needs a tokenizer, got the path"):
        check_template("model")


def test_the_template_for_tools_also_renders_their_results(tokenizer: Any) -> None:
    """A tokenizer with several templates, as that of Hermes 3: the first prompt with tools selects `tool_use`."""
    with_tools = RIGHT.replace("{{ m.content }}", "{{ '[' + m.content + ']' if m.role == 'tool' else m.content }}")
    tokenizer.chat_template = {"default": RIGHT, "tool_use": with_tools}
    report = check_template(tokenizer)
    assert set(verdicts(report).values()) == {Verdict.EQUAL}, report
    token_ids = ChatRenderer(tokenizer).render_next_turn([{"role": "tool", "name": "add", "content": "7"}], [])
    assert "[7]" in tokenizer.decode(token_ids)


def test_a_message_that_the_template_changes_later_is_kept(tokenizer: Any) -> None:
    """As Hermes': the last result ends otherwise than the results before other messages."""
    template = RIGHT.replace("{{ m.content }}", "{{ m.content + ('!' if m.role == 'tool' and not loop.last else '') }}")
    report = check(tokenizer, template)
    assert verdicts(report)["tool result"] is Verdict.EQUAL
    assert verdicts(report)["answer after result"] is Verdict.KEPT
    assert "changes an earlier message" in reason(report, "answer after result")


def test_an_empty_list_of_tools_is_no_list_of_tools(tokenizer: Any) -> None:
    """Templates such as Llama's write a preamble where `tools` is a list."""
    tokenizer.chat_template = "{%- if tools is not none %}Tools:{%- endif %}" + RIGHT
    renderer = ChatRenderer(tokenizer)
    messages = [{"role": "user", "content": "x"}]
    assert renderer.render_prompt(messages, []) == renderer.render_prompt(messages)


def test_a_result_without_an_id_gets_one_in_a_family(tokenizer: Any) -> None:
    """Kimi's results begin with their id, which would be empty."""
    names = ["im_user", "im_assistant", "im_system", "im_middle", "tool_calls_section_begin", "tool_calls_section_end"]
    names += ["tool_call_begin", "tool_call_argument_begin", "tool_call_end"]
    extra = [f"<|{name}|>" for name in names]
    tokenizer.add_special_tokens({"additional_special_tokens": extra}, replace_extra_special_tokens=False)
    renderer = FamilyRenderer(tokenizer, "kimi-k2")
    prompt_ids = renderer.render_prompt([{"role": "user", "content": "u"}])
    turn_ids = renderer.encode("x<|im_end|>")
    token_ids = renderer.render_next_turn([{"role": "tool", "name": "add", "content": "7"}], turn_ids, prompt_ids)
    assert "Return of call00000\n7" in tokenizer.decode(token_ids)


def test_a_family_with_conflicting_defaults_takes_arguments(tokenizer: Any) -> None:
    """A default value that the caller did not give is not passed on: it may conflict with the kept thoughts."""
    names = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names}, replace_extra_special_tokens=False)
    tokenizer.add_tokens(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
    family = FamilyRenderer(tokenizer, "glm-5", enable_thinking=False)
    question = [{"role": "user", "content": "u"}]
    assert family.render_prompt(question) != FamilyRenderer(tokenizer, "glm-5").render_prompt(question)


def test_the_command_prints_the_report(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = RIGHT
    tokenizer.save_pretrained(tmp_path)
    runner = CliRunner()
    done = runner.invoke(app, ["check-template", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "two tool rounds" in done.stdout
    assert "usable" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "tool calls: found"
    assert "17" not in done.stdout
    report = json.loads(runner.invoke(app, ["check-template", str(tmp_path), "--json"]).stdout)
    assert (report["usable"], report["tool_calls"]) == (True, "found")
    assert {row["verdict"] for row in report["conversations"]} == {"equal"}
    tokenizer.chat_template = NUMBERS_LATER_USERS
    tokenizer.save_pretrained(tmp_path)
    done = runner.invoke(app, ["check-template", str(tmp_path)])
    assert done.exit_code == 1
    assert "1 different" in done.stdout
    tokenizer.chat_template = REFUSES_ALL
    tokenizer.save_pretrained(tmp_path)
    done = runner.invoke(app, ["check-template", str(tmp_path)])
    assert done.exit_code == 1
    assert "Refused: the chat template refuses" in done.stdout
    with pytest.raises(BadInputError, match="cannot be loaded"):
        runner.invoke(app, ["check-template", str(tmp_path / "none")], catch_exceptions=False)


def test_the_table_has_a_row_for_each_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import check_templates

    for name, template in {"right": RIGHT, "silent": DROPS_RESULTS, "raises": REFUSES_ALL, "qwen3": QWEN}.items():
        (tmp_path / f"{name}.jinja").write_text(template)
    monkeypatch.setattr("sys.argv", ["check_templates.py", str(tmp_path)])
    check_templates.main()
    rows = {
        line.split("|")[1].strip(" `") + line.split("|")[2]: line for line in capsys.readouterr().out.splitlines()[2:7]
    }
    assert list(rows) == [
        "qwen3 generic ",
        "qwen3 family qwen3 ",
        "raises generic ",
        "right generic ",
        "silent generic ",
    ]
    assert rows["right generic "].count(" = |") == 16
    assert rows["right generic "].endswith("| - | yes |  |")
    assert rows["silent generic "].endswith("| - | yes | r: not shown |")
    assert rows["qwen3 generic "].split("|")[-3] == " - ", "this template does not show calls"
    assert rows["silent generic "].count(" r |") == len(WITH_RESULTS)
    assert rows["raises generic "].endswith("| refused: template refuses |")


def test_a_template_without_tools_is_called_so(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["check-template", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "usable without tools only" in done.stdout.splitlines()
