// Shows Markdown as elements. Elements are made one by one, never from HTML.
import { memo } from "./memo";
import { useState } from "preact/hooks";
import type { Block, Inline } from "./markdown";
import { lex, parse } from "./markdown";

function Words(props: { of: Inline[] }) {
  return (
    <>
      {props.of.map((part, index) => {
        switch (part.kind) {
          case "text":
            return part.text;
          case "code":
            return <code key={index}>{part.text}</code>;
          case "break":
            return <br key={index} />;
          case "strong":
            return <strong key={index}>{<Words of={part.of} />}</strong>;
          case "em":
            return <em key={index}>{<Words of={part.of} />}</em>;
          case "del":
            return <del key={index}>{<Words of={part.of} />}</del>;
          case "link":
            return (
              <a key={index} href={part.href} target="_blank" rel="noopener noreferrer nofollow">
                <Words of={part.of} />
              </a>
            );
        }
      })}
    </>
  );
}

function Code(props: { language: string; text: string }) {
  const [copied, setCopied] = useState("Copy");
  const copy = () =>
    navigator.clipboard.writeText(props.text).then(
      () => setCopied("Copied"),
      () => setCopied("Not allowed here"),
    );
  return (
    <div class="code">
      <div class="codebar">
        <span>{props.language || "text"}</span>
        <button type="button" class="small" onClick={copy} aria-label={`Copy the ${props.language || "code"}`}>
          <span aria-live="polite">{copied}</span>
        </button>
      </div>
      <pre tabIndex={0}>
        <code>
          {lex(props.text).map((part, index) => (part.tone ? <span class={part.tone} key={index}>{part.text}</span> : part.text))}
        </code>
      </pre>
    </div>
  );
}

function Blocks(props: { of: Block[] }) {
  return (
    <>
      {props.of.map((block, index) => {
        switch (block.kind) {
          case "paragraph":
            return <p key={index}><Words of={block.of} /></p>;
          case "heading": {
            // Below the page's own two levels.
            const Heading = `h${Math.min(block.level + 2, 6)}` as "h3";
            return <Heading key={index}><Words of={block.of} /></Heading>;
          }
          case "code":
            return <Code key={index} language={block.language} text={block.text} />;
          case "quote":
            return <blockquote key={index}><Blocks of={block.of} /></blockquote>;
          case "rule":
            return <hr key={index} />;
          case "list": {
            const items = block.items.map((item, place) => (
              <li key={place}>{item.length === 1 && item[0]!.kind === "paragraph" ? <Words of={item[0]!.of} /> : <Blocks of={item} />}</li>
            ));
            return block.start === null ? <ul key={index}>{items}</ul> : <ol key={index} start={block.start}>{items}</ol>;
          }
          case "table":
            return (
              <div class="scroll" key={index} tabIndex={0} role="region" aria-label="Table">
                <table>
                  <thead><tr>{block.head.map((cell, column) => <th scope="col" key={column}><Words of={cell} /></th>)}</tr></thead>
                  <tbody>{block.rows.map((row, place) => <tr key={place}>{row.map((cell, column) => <td key={column}><Words of={cell} /></td>)}</tr>)}</tbody>
                </table>
              </div>
            );
        }
      })}
    </>
  );
}

/** A text of Markdown. */
export const Prose = memo(function Prose(props: { text: string }) {
  return (
    <div class="prose">
      <Blocks of={parse(props.text)} />
    </div>
  );
});
