"""What overlap would be worth: schedules played with the costs of a layer."""
