"""Supervised fine-tuning: conversations from files, trained by the learner without a broker or workers."""
