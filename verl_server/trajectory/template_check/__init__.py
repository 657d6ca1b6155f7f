"""A check of chat templates: does a prompt that grows by turns equal what the template renders for the conversation?

conversations.py  the fixed conversations, and the conversations with the template's control tokens
reference.py      what the template itself renders for a conversation, and what a policy would sample in its turns
call_turn.py      a turn with a tool call, as a policy samples it
comparison.py     compares the text of a grown prompt with the text of the template, as pure functions
check.py          `check_template`: all conversations with one renderer
table.py          the report as a table for a terminal and as JSON
"""
