"""Pictures and captions, and the schedule that says in advance what every training sample is."""
