"""The phases whose texts follow the rules for prose and whose sections have all their parts."""

PHASES = (1, 2, 3, 4)
