"""GPT-2 pretraining: data, model, loop and report. Engines are in their frameworks' folders.

python -m alto_distributed prepare | pretrain | compare | report
"""
