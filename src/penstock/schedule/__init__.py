"""WHEN: actions, the rule table, schedules and the families that build them."""
