"""Predicts what overlap would save, by simulating schedules with the costs of a layer."""
