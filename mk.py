import random, json
r=random.Random(7)
words=["alpha","héad","mixture","of","heads","zß","12","\n","(x)","Δ","token","the"]
k=0
for name,files,n in (("a",5,7000),("b",2,3000)):
    for f in range(files):
        with open(f"/tmp/reader_B/acc/{name}{f}.jsonl","w") as h:
            for _ in range(n//files):
                L=min(900,int(r.lognormvariate(2.5,1.1))+1)
                h.write(json.dumps({"text":f"d{k} "+" ".join(r.choice(words) for _ in range(L))})+"\n"); k+=1
