"""A check of chat templates: does a prompt that grows by turns equal what the template renders for the conversation?

reference.py  the fixed conversations, what the template renders for them, and what a policy would sample
check.py      `check_template`: all conversations with one renderer; comparison and report
"""
