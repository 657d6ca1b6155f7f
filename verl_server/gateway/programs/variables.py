"""The environment variables by which agent programs find the gateway."""

from __future__ import annotations

MODEL = "policy"


def program_variables(url: str, key: str) -> dict[str, str]:
    """Environment variables for a program that acts through the gateway at `url` (without `/v1`).

    They are those of OpenAI's and Anthropic's SDKs, of LiteLLM, and of Claude Code, which then sends nothing to other
    addresses. Codex takes its address from its settings: see docs/train-claude-code.md.
    """
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "IS_SANDBOX": "1",
    }
