"""The pages on which a person sees what scripts did, and decides what they may do."""
