"""Schedules as data: actions, the rule table, text forms, lowering and verification."""
