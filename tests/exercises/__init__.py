"""The graders of the course's exercises, and the process that a student's file runs in."""
