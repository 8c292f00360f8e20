"""Controllers: when to measure again, when to change the plan. They see only agreed numbers."""
