"""The recipe of the small story model: a seeded story grammar, a trainer and an evaluation."""
