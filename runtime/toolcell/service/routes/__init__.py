"""What can be asked, one module for each subject."""
